"""The target's LM head as a drafter uses it: frozen, and cut to the draft vocabulary.

Read FrozenHead.of.
"""

from dataclasses import dataclass

import torch

from draftlab.drafters.layers import fuse
from draftlab.drafters.vocab import DraftVocab, kept_target_head
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


@dataclass(frozen=True, slots=True)
class FrozenHead:
    """Rows of the target's LM head; no module, so that they are never trained, saved or cast.

    Attributes:
        target: whose head it is.
        vocab: the draft vocabulary; None when it is whole.
        ids: target id of every row; None when they are all rows in order.
        rows: the head that the drafter predicts with.
        kept: rows the target's law can be computed with; see `kept_target_head`.
    """

    target: TargetView
    vocab: DraftVocab | None
    ids: Int[Tensor, " C"] | None
    rows: Float[Tensor, "C D"]
    kept: Float[Tensor, "C D"] | None

    @classmethod
    def of(cls, target: TargetView, vocab: DraftVocab | None) -> "FrozenHead":
        """Cut the target's head."""
        ids = None if vocab is None else vocab.ids.to(target.device)
        return cls(target, vocab, ids, target.head_rows(ids), kept_target_head(target, vocab))

    @property
    def size(self) -> int:
        """C, rows."""
        return self.rows.shape[0]

    def support(self) -> Int[Tensor, " C"]:
        """Give the target ids that may be proposed; padding rows, which come last, may not."""
        if self.ids is not None:
            return self.ids
        return torch.arange(self.target.spec.num_token_ids, device=self.rows.device)

    def packed(self, dtype: torch.dtype) -> PackedLinear:
        """Lay the rows of `support` out for decoding."""
        return fuse(self.rows[: self.support().shape[0]].to(dtype))

    def serving_tensors(self) -> dict[str, Tensor]:
        """Give what an engine needs of a reduced vocabulary; nothing for a whole one."""
        if self.vocab is None:
            return {}
        tensors = {"lm_head.weight": self.rows}
        if self.vocab.size != self.vocab.target_vocab_size:
            tensors |= {"d2t": self.vocab.d2t, "t2d": self.vocab.t2d}
        return tensors
