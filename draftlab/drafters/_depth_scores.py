"""From "depth k of row t predicts token t + lead + k" to a loss.

In: which predictions count, and a hidden state for each. Out: the same predictions sorted by the
token predicted, so that the target's law of a token is computed once for all depths, and their
loss. Read Predictions.arrange, then score; what each weighs is decided in between (_weighing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters.base import DraftLoss
from draftlab.drafters.vocab import judged_rows
from draftlab.objectives.acceptance import overlap
from draftlab.objectives.chunked import chunked_scores
from draftlab.objectives.named import Objective
from draftlab.objectives.pieces import cut_into_pieces
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
        weights: what each weighs in the loss, 0 where it does not count; all alike when arranged.
        averages_tokens: the loss is a mean over predictions; else over sequences, in each of which
            weights add up to 1.
    """

    batch_rows: Int[Tensor, " N"]
    judges: Int[Tensor, " N"]
    sources: Int[Tensor, "K N"]
    counts: Bool[Tensor, "K N"]
    weights: Float[Tensor, "K N"]
    averages_tokens: bool = False

    @classmethod
    def arrange(
        cls,
        batch: TokenBatch,
        masks: Bool[Tensor, "K B T"],
        *,
        lead: int,
        dtype: torch.dtype,
    ) -> "Predictions":
        """Sort predictions by the token they are about.

        Args:
            batch: token rows.
            masks: True where depth k of row t predicts token t + lead + k and that counts.
            lead: how far ahead the first depth looks.
            dtype: of the drafter; weights are float32 or wider.
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
        wide = torch.promote_types(dtype, torch.float32)
        return cls(rows, judges, inside, counts, counts.to(wide))

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
    matrices: Sequence[Float[Tensor, "C Dh"]],
    batch: TokenBatch,
    final: Float[Tensor, "B T D"],
) -> DraftLoss:
    """Meet the target's law with every prediction.

    Args:
        objective: see draftlab.objectives.named.
        predictions: which, and how they weigh.
        hidden: what `matrices` turn into draft logits.
        head: the draft vocabulary.
        matrices: the drafter's LM head, one for all depths or one a depth.
        batch: token rows.
        final: the target's final hidden states.
    """
    rows, judges = predictions.batch_rows, predictions.judges
    scores = chunked_scores(
        objective,
        hidden,
        matrices,
        target_final=final[rows, judges],
        target_head=head.target.head,
        labels=batch.input_ids[rows, judges + 1],
        weights=predictions.weights,
        vocab_ids=head.ids,
        kept_head=head.kept,
        judged=judged_rows(batch.positions[rows, judges]),
    )
    weight = predictions.weights.sum() if predictions.averages_tokens else None
    return DraftLoss(
        scores.total, scores.loss_sum, scores.hit_sum, scores.overlap_sum, scores.count, weight
    )


@torch.no_grad()
def acceptances(
    head: FrozenHead,
    hidden: Float[Tensor, "K N D"],
    final: Float[Tensor, "N D"],
    counts: Bool[Tensor, "K N"],
) -> Float[Tensor, "K N"]:
    """Compute sum_v min(p, q) of predictions against the target's whole law.

    Args:
        head: the draft vocabulary and its frozen rows.
        hidden: what these rows multiply.
        final: the target's final hidden state that judges each token.
        counts: True where there is such a prediction; the others cost nothing and give 0.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = head.rows.to(hidden.dtype)
    found = hidden.new_zeros(hidden.shape[:2], dtype=wide)
    for chunk in cut_into_pieces(counts, judged=None, chunk_rows=_JUDGED_AT_ONCE, num_heads=1):
        law = head.target.head(final[chunk.tokens]).to(wide).log_softmax(-1)
        law = law if head.ids is None else law.index_select(-1, head.ids)
        for piece in chunk.pieces:
            places = piece.depths, piece.tokens
            log_q = (hidden[places] @ rows.T).to(wide).log_softmax(-1)
            found[places] = overlap(law[piece.rows], log_q)
    return found
