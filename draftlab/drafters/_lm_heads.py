"""LM heads of a drafter with a network a depth: a matrix each, the target's rows, or low rank."""

from typing import Literal

import torch
from torch import nn

from draftlab.errors import ConfigError
from draftlab.shapes import Float, Tensor

HeadForm = Literal["own", "tied", "low_rank"]


class LMHeads(nn.Module):
    """K maps from hidden states to draft logits, all started from the target's head.

    `tied` has no parameters and one matrix for all; `low_rank` goes D -> rank -> C, started from
    the best such approximation.
    """

    # a plain attribute: the target's weights are never parameters, never saved
    _tied: Tensor | None

    def __init__(
        self, form: HeadForm, rank: int | None, count: int, rows: Float[Tensor, "C D"]
    ) -> None:
        """Make the heads.

        Args:
            form: see the class.
            rank: of low_rank.
            count: K.
            rows: the target's head, cut to the draft vocabulary.

        Raises:
            ConfigError: a rank above the width.
        """
        super().__init__()
        self._tied = rows if form == "tied" else None
        self.downs = nn.ModuleList()
        self.tops = nn.ModuleList()
        if form == "own":
            self.tops.extend(_linear(rows) for _ in range(count))
        elif form == "low_rank":
            assert rank is not None, "settings ask for it"
            down, top = _best_of_rank(rows, rank)
            self.downs.extend(_linear(down) for _ in range(count))
            self.tops.extend(_linear(top) for _ in range(count))

    @property
    def matrices(self) -> list[Float[Tensor, "C Dh"]]:
        """The last matrix of every head, one for all when tied."""
        if self._tied is not None:
            return [self._tied]
        return [top.get_parameter("weight") for top in self.tops]

    def into(self, k: int, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N Dh"]:
        """Compute what the last matrix of head k multiplies."""
        return self.downs[k](hidden) if self.downs else hidden


def _linear(weight: Float[Tensor, "Do Di"]) -> nn.Linear:
    """A trainable copy of a matrix, float32 or wider, without bias."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    out, into = weight.shape
    layer = nn.Linear(into, out, bias=False, device=weight.device, dtype=wide)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def _best_of_rank(
    rows: Float[Tensor, "C D"], rank: int
) -> tuple[Float[Tensor, "r D"], Float[Tensor, "C r"]]:
    """Factor the best rank-r approximation: project on the r main directions of the rows."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if rank > wide.shape[1]:
        raise ConfigError(
            f"head_rank={rank} exceeds the target's hidden size {wide.shape[1]}; choose less, or "
            "head=own"
        )
    _, directions = torch.linalg.eigh(wide.T @ wide)  # ascending
    down = directions[:, -rank:].T
    return down, wide @ down.T
