"""From "depth k of row t predicts token t + lead + k" to a loss.

In: which predictions count, and a hidden state for each. Out: the same predictions sorted by the
token predicted, so that the target's law of a token is computed once for all depths, and their
loss. Read Predictions.arrange, then score.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._unrolling import sequence_sums
from draftlab.drafters.base import DraftLoss
from draftlab.drafters.vocab import judged_rows
from draftlab.objectives.acceptance import overlap
from draftlab.objectives.chunked import chunked_scores
from draftlab.objectives.named import Objective
from draftlab.shapes import Bool, Float, Int, Tensor

_JUDGED_AT_ONCE = 256  # whole target laws alive at a time


@dataclass(frozen=True, slots=True)
class Predictions:
    """N tokens to predict, each from K depths.

    Attributes:
        batch_rows: row of the batch.
        judges: position u whose target law judges token u + 1.
        sources: row t that predicts it at each depth; 0 or more, also where it does not count.
        counts: True where that depth has such a prediction.
        weights: step_decay ** depth where it counts, divided by the sum over its sequence.
    """

    batch_rows: Int[Tensor, " N"]
    judges: Int[Tensor, " N"]
    sources: Int[Tensor, "K N"]
    counts: Bool[Tensor, "K N"]
    weights: Float[Tensor, "K N"]

    @classmethod
    def arrange(
        cls,
        batch: TokenBatch,
        masks: Bool[Tensor, "K B T"],
        *,
        lead: int,
        step_decay: float,
        dtype: torch.dtype,
    ) -> "Predictions":
        """Sort predictions by the token they are about.

        Args:
            batch: token rows.
            masks: True where depth k of row t predicts token t + lead + k and that counts.
            lead: how far ahead the first depth looks.
            step_decay: weight of a depth relative to the one before it.
            dtype: of the weights, float32 or wider.
        """
        num_depths, _, width = masks.shape
        needed = torch.zeros_like(masks[0])
        for depth, mask in enumerate(masks):
            ahead = lead - 1 + depth
            if ahead < width:
                needed[:, ahead:] |= mask[:, : width - ahead]
        rows, judges = needed.nonzero(as_tuple=True)
        depths = torch.arange(num_depths, device=masks.device).unsqueeze(1)
        sources = judges - (lead - 1) - depths
        inside = sources.clamp_min(0)
        counts = (sources >= 0) & masks[depths, rows, inside]
        weights = counts.to(dtype) * step_decay ** depths.to(dtype)
        sums = sequence_sums(batch.segment_ids, rows, judges, weights.sum(0))
        return cls(rows, judges, inside, counts, weights / sums)

    def take(
        self, states: Sequence[Float[Tensor, "B _ D"]], place: Int[Tensor, "B T"]
    ) -> Float[Tensor, "K N D"]:
        """Gather the hidden state of every prediction.

        Args:
            states: of each depth, the rows that have one packed to the left.
            place: where row t is among them, -1 when it is not; see `PickedRows`.
        """
        taken = []
        for state, source in zip(states, self.sources, strict=True):
            width = state.shape[1]
            where = place[self.batch_rows, source].clamp(0, width - 1) + self.batch_rows * width
            taken.append(state.flatten(0, 1).index_select(0, where))
        return torch.stack(taken)


def score(
    objective: Objective,
    predictions: Predictions,
    hidden: Float[Tensor, "K N Dh"],
    head: FrozenHead,
    matrix: Float[Tensor, "C Dh"],
    batch: TokenBatch,
    final: Float[Tensor, "B T D"],
) -> DraftLoss:
    """Meet the target's law with every prediction.

    Args:
        objective: see draftlab.objectives.named.
        predictions: which, and how they weigh.
        hidden: what `matrix` turns into draft logits.
        head: the draft vocabulary.
        matrix: the drafter's LM head, `head.rows` or more columns than that.
        batch: token rows.
        final: the target's final hidden states.
    """
    rows, judges = predictions.batch_rows, predictions.judges
    scores = chunked_scores(
        objective,
        hidden,
        [matrix],
        target_final=final[rows, judges],
        target_head=head.target.head,
        labels=batch.input_ids[rows, judges + 1],
        weights=predictions.weights,
        vocab_ids=head.ids,
        kept_head=head.kept,
        judged=judged_rows(batch.positions[rows, judges]),
    )
    return DraftLoss(
        scores.total, scores.loss_sum, scores.hit_sum, scores.overlap_sum, scores.count
    )


@torch.no_grad()
def acceptances(
    head: FrozenHead, hidden: Float[Tensor, "K N D"], final: Float[Tensor, "N D"]
) -> Float[Tensor, "K N"]:
    """Compute sum_v min(p, q) of predictions against the target's whole law.

    Args:
        head: the draft vocabulary and its frozen rows.
        hidden: what these rows multiply.
        final: the target's final hidden state that judges each token.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = head.rows.to(hidden.dtype)
    found = hidden.new_zeros(hidden.shape[:2], dtype=wide)
    for start in range(0, final.shape[0], _JUDGED_AT_ONCE):
        part = slice(start, start + _JUDGED_AT_ONCE)
        law = head.target.head(final[part]).to(wide).log_softmax(-1)
        law = law if head.ids is None else law.index_select(-1, head.ids)
        for depth, states in enumerate(hidden[:, part]):
            found[depth, part] = overlap(law, (states @ rows.T).to(wide).log_softmax(-1))
    return found
