"""What every prediction counts in the loss of a drafter of many depths. Read weigh."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._unrolling import sequence_sums
from draftlab.drafters.base import DraftVocabSettings
from draftlab.objectives.chunked import chunked_label_probs
from draftlab.objectives.named import objective
from draftlab.objectives.weights import by_place, d_pace, decayed
from draftlab.shapes import Float, Int, Tensor

PositionWeights = Literal["decay", "d_pace"]
Normalise = Literal["sequence", "token"]


class LossSettings(DraftVocabSettings):
    """Keys of drafters that the target's law teaches at several depths.

    Attributes:
        position_weights: decay weighs depth k by decay ** k; d_pace by how likely it is reached.
        normalise: sequence gives every answer the same weight; token every token.
        objective: name of the loss between the laws, or a weighted sum: 0.1*forward_kl+top_k.
    """

    decay_key: ClassVar[str]  # a depth is a step for some drafters, a head for others
    position_weights: PositionWeights
    normalise: Normalise
    objective: str

    @property
    def decay(self) -> float | None:
        """Weight of a depth relative to the one before it; None with d_pace."""
        return getattr(self, self.decay_key)

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, name: str) -> str:
        objective(name)
        return name

    @model_validator(mode="after")
    def _check_decay(self) -> "LossSettings":
        if (self.position_weights == "decay") != (self.decay is not None):
            raise ValueError(
                f"{self.decay_key}={self.decay} with position_weights={self.position_weights}; "
                "expected a number with position_weights=decay, and null otherwise"
            )
        return self


class StepLossSettings(LossSettings):
    """Settings of drafters whose depths are steps.

    Attributes:
        step_decay: for position_weights=decay, None otherwise.
    """

    decay_key = "step_decay"
    step_decay: float | None = Field(gt=0, le=1)


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
