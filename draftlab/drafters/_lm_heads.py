"""LM heads of a drafter with a network a depth: a matrix each, the target's rows, or low rank."""

from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import nn

from draftlab.drafters._weighing import LossSettings
from draftlab.errors import ConfigError
from draftlab.shapes import Float, Tensor

HeadForm = Literal["own", "tied", "low_rank"]


class HeadsSettings(LossSettings):
    """Settings of drafters with a head for every draft token.

    Attributes:
        num_heads: heads, at least `num_draft_tokens`.
        num_blocks: layers of a head's network, each with weights of its own.
        head: own trains a Vd x D matrix a head, started from the target's; tied uses the target's
            frozen rows; low_rank trains D -> rank -> Vd, started from the best such approximation
            of the target's.
        head_rank: rank of `low_rank`, None otherwise.
        head_decay: for position_weights=decay, None otherwise.
    """

    decay_key = "head_decay"
    num_heads: PositiveInt
    num_blocks: PositiveInt
    head: HeadForm
    head_rank: PositiveInt | None
    head_decay: PositiveFloat | None

    @model_validator(mode="after")
    def _check_heads(self) -> "HeadsSettings":
        if self.num_heads < self.num_draft_tokens:
            raise ValueError(
                f"num_heads={self.num_heads} is below num_draft_tokens={self.num_draft_tokens}; "
                "expected a head for every draft token"
            )
        if (self.head == "low_rank") != (self.head_rank is not None):
            raise ValueError(
                f"head_rank={self.head_rank} with head={self.head}; expected a rank with "
                "head=low_rank, and null otherwise"
            )
        return self


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
        wide = torch.promote_types(rows.dtype, torch.float32)
        self.downs, self.tops = start_heads(form, rank, count, rows, wide)

    @property
    def matrices(self) -> list[Float[Tensor, "C Dh"]]:
        """The last matrix of every head, one for all when tied."""
        if self._tied is not None:
            return [self._tied]
        return [top.get_parameter("weight") for top in self.tops]

    def into(self, k: int, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N Dh"]:
        """Compute what the last matrix of head k multiplies."""
        return self.downs[k](hidden) if self.downs else hidden


def start_heads(
    form: HeadForm, rank: int | None, count: int, rows: Float[Tensor, "C D"], dtype: torch.dtype
) -> tuple[nn.ModuleList, nn.ModuleList]:
    """Make the trained matrices of heads that start as the target's: D -> rank, and D or rank -> C.

    Args:
        form: tied has none at all, own none that lead down to a rank.
        rank: of low_rank.
        count: K.
        rows: the target's head, cut to the draft vocabulary.
        dtype: of the matrices.

    Raises:
        ConfigError: a rank above the width.
    """
    downs, tops = nn.ModuleList(), nn.ModuleList()
    if form == "own":
        tops.extend(_linear(rows, dtype) for _ in range(count))
    elif form == "low_rank":
        assert rank is not None, "settings ask for it"
        down, top = _best_of_rank(rows, rank)
        downs.extend(_linear(down, dtype) for _ in range(count))
        tops.extend(_linear(top, dtype) for _ in range(count))
    return downs, tops


def _linear(weight: Float[Tensor, "Do Di"], dtype: torch.dtype) -> nn.Linear:
    """A trainable copy of a matrix, without bias."""
    out, into = weight.shape
    layer = nn.Linear(into, out, bias=False, device=weight.device, dtype=dtype)
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
