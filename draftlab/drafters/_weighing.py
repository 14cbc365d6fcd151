"""What every prediction counts in the loss of a drafter of many depths. Read weigh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._unrolling import sequence_sums
from draftlab.objectives.chunked import chunked_label_probs
from draftlab.objectives.weights import by_place, d_pace, decayed
from draftlab.shapes import Float, Int, Tensor

PositionWeights = Literal["decay", "d_pace"]
Normalise = Literal["sequence", "token"]


def check_position_weights(how: PositionWeights, decay: float | None, *, key: str) -> None:
    """Refuse a decay that has no effect, or a missing one.

    Raises:
        ValueError: for a settings validator.
    """
    if (how == "decay") != (decay is not None):
        raise ValueError(
            f"{key}={decay} with position_weights={how}; expected a number with "
            "position_weights=decay, and null otherwise"
        )


def weigh(
    predictions: Predictions,
    batch: TokenBatch,
    hidden: Float[Tensor, "K N D"],
    heads: Sequence[Float[Tensor, "C D"]],
    vocab_ids: Int[Tensor, " C"] | None,
    *,
    decay: float | None,
    normalise: Normalise,
) -> Predictions:
    """Replace the weights of predictions.

    Args:
        predictions: N tokens from K depths.
        batch: token rows.
        hidden: inputs of the draft head.
        heads: one for all depths or one a depth.
        vocab_ids: target ids of the draft vocabulary; None when it is whole.
        decay: weight of a depth relative to the one before it; None weighs each depth by the
            chance that it is reached (D-PACE).
        normalise: sequence makes the weights of a sequence add up to 1, so that its loss is a mean
            and long answers do not dominate; token lets every token count the same. What these are
            divided by is known to the trainer alone: a batch's own count would weigh a token by
            its batch-mates, and one large batch unlike the same rows in several (case O-22).
    """
    rows, judges, counts = predictions.batch_rows, predictions.judges, predictions.counts
    if decay is None:
        labels = batch.input_ids[rows, judges + 1]
        probs = chunked_label_probs(
            hidden.detach(), heads, labels=labels, vocab_ids=vocab_ids, made=counts
        )
        places = rows * batch.input_ids.shape[1] + predictions.sources
        num_places = batch.input_ids.numel()
        is_there = by_place(counts.to(probs.dtype), places, num_places) > 0
        chains = d_pace(by_place(probs, places, num_places), is_there)
        weights = chains.gather(1, places) * counts
    else:
        weights = decayed(counts, decay).to(torch.promote_types(hidden.dtype, torch.float32))
    if normalise == "token":
        return replace(predictions, weights=weights, averages_tokens=True)
    sums = sequence_sums(batch.segment_ids, rows, judges, weights.sum(0))
    return replace(predictions, weights=weights / sums)
