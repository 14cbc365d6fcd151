"""Attention of packed rows to themselves, some consecutive columns at a time: no T x T tensor.

A column sees its own sample up to itself, or through a sliding window the last few columns of that.
So a piece of columns sees nothing before the first key of its first column, and a mask of the piece
by the keys from there on says the rest. Read PackedAttention.attend.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.attention import attend, tile_mask

# columns of a piece. On a processor, scores computed in vain cost most. A layer attends, in ms on
# one core with pieces of 64, 128, 256 and 512: 12, 17, 24, 34 (4 x 512 of samples of about 100),
# 50, 57, 77, 119 (1 x 4096 of about 512), 304, 313, 317, 332 (of one); 32 is no faster. On a GPU it
# should be the dozen launches a piece: reckoned, not measured
_CPU_COLUMNS, _GPU_COLUMNS = 64, 512
_KEPT_MASKS = 1 << 24  # elements


@dataclass(frozen=True, slots=True)
class _Piece:
    """Columns start..stop-1 of all rows; keys first..stop-1 are all that any of them may see."""

    start: int
    stop: int
    first: int

    def cut(self, query: Tensor, keys: Tensor, values: Tensor, *sinks: Tensor) -> list[Tensor]:
        """Take what belongs to the piece, as views."""
        near = slice(self.first, self.stop)
        return [query[:, :, self.start : self.stop], keys[:, :, near], values[:, :, near], *sinks]


@dataclass(frozen=True, slots=True)
class _Scoring:
    """What a layer asks for, beside its sinks; see PackedAttention.attend."""

    window: int | None
    scale: float
    softcap: float | None


class PackedAttention:
    """How packed rows attend, for all layers of one pass.

    By a dense mask every column is compared with every other, and at T = 8192 with G = 4 a pass
    took 1,405 MB; now 112 with one sample, 39 with samples of 100. CPU time in ms on one core
    against it, 9 query heads on 3 key heads of 64, 576 wide; a pass of a target of 4 layers, and a
    training step of a draft model of 2:
    4 x 512 of samples of about 100: 640 against 738, 1,082 against 1,216;
    4 x 512 of one sample each: 669 against 717, 1,181 against 1,224;
    1 x 4096 of samples of 512: 1,535 against 4,049, 2,472 against 6,170;
    1 x 4096 of one sample: 2,405 against 3,866, 4,967 against 5,942.
    """

    def __init__(self, segments: Int[Tensor, "R T"]) -> None:
        """Look where samples begin. The host waits for that, once a pass.

        Args:
            segments: as in `Step`.
        """
        length = segments.shape[1]
        self._columns = torch.arange(length, dtype=torch.int32, device=segments.device)
        begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        # a column of padding is a sample of its own: one that saw nothing would give NaN
        begins = begins | (segments < 0)
        self._first = torch.where(begins, self._columns, 0).cummax(dim=1).values
        longest = _CPU_COLUMNS if segments.device.type == "cpu" else _GPU_COLUMNS
        size = math.ceil(length / math.ceil(length / longest))
        starts = range(0, length, size)
        # from a column to the next, the first key never goes back
        firsts = self._first[:, ::size].amin(0).tolist()
        self._pieces = [
            _Piece(start, min(start + size, length), first)
            for start, first in zip(starts, firsts, strict=True)
        ]
        # masks are made once for all layers while there is room. Those of one long sample are half
        # of T x T together: without room each layer makes its own, 1 to 5 % of its attention's time
        self._kept: dict[tuple[_Piece, int | None, int], Tensor] = {}
        self._room = _KEPT_MASKS

    def attend(
        self,
        query: Float[Tensor, "R Hq T Dh"],
        keys: Float[Tensor, "R H T Dh"],
        values: Float[Tensor, "R H T Dv"],
        *,
        window: int | None,
        scale: float,
        softcap: float | None = None,
        sinks: Float[Tensor, " Hq"] | None = None,
    ) -> Float[Tensor, "R T Hq Dv"]:
        """Do what `attention.attend` does by the mask of `Step.visible`.

        Args:
            query: Hq = G * H heads; head h uses key head h // G.
            keys: of all columns.
            values: alike.
            window: columns that a column sees, itself included, or None.
            scale: as there.
            softcap: as there.
            sinks: as there.
        """
        scoring = _Scoring(window, scale, softcap)
        tensors = (query, keys, values) if sinks is None else (query, keys, values, sinks)
        if len(self._pieces) > 1 and torch.is_grad_enabled():
            return _Recomputed.apply(self, scoring, *tensors)
        return self.attend_in_pieces(scoring, *tensors)

    def attend_in_pieces(
        self, scoring: _Scoring, *tensors: Float[Tensor, "..."]
    ) -> Float[Tensor, "R T Hq Dv"]:
        """Attend, a piece after the other; tensors are `attend`'s."""
        parts = [
            self.attend_piece(piece, scoring, *piece.cut(*tensors))
            for piece in self.pieces(scoring.window)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def attend_piece(
        self,
        piece: _Piece,
        scoring: _Scoring,
        query: Float[Tensor, "R Hq N Dh"],
        keys: Float[Tensor, "R H S Dh"],
        values: Float[Tensor, "R H S Dv"],
        sinks: Float[Tensor, " Hq"] | None = None,
    ) -> Float[Tensor, "R N Hq Dv"]:
        """Let the N columns of a piece attend; tensors are cut to it."""
        mask = self._mask(piece, scoring.window, query.shape[1] // keys.shape[1])
        scale, softcap = scoring.scale, scoring.softcap
        return attend(query, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)

    def pieces(self, window: int | None) -> list[_Piece]:
        """Give the pieces, their keys cut to what a window leaves."""
        if window is None:
            return self._pieces
        return [replace(p, first=max(p.first, p.start - window + 1)) for p in self._pieces]

    def _mask(self, piece: _Piece, window: int | None, groups: int) -> Bool[Tensor, "R 1 GT S"]:
        """Say which of its keys the columns of a piece see."""
        kept = self._kept.get((piece, window, groups))
        if kept is not None:
            return kept
        own = self._columns[piece.start : piece.stop]
        first = self._first[:, piece.start : piece.stop]
        if window is not None:
            first = first.maximum(own - (window - 1))
        near = self._columns[piece.first : piece.stop]
        mask = tile_mask((near >= first.unsqueeze(2)) & (near <= own.unsqueeze(1)), groups)
        if mask.numel() <= self._room:
            self._room -= mask.numel()
            self._kept[piece, window, groups] = mask
        return mask


class _Recomputed(torch.autograd.Function):
    """Attention in pieces that keeps its inputs alone: for gradients, each piece attends again.

    Kept scores and masks of all layers would be what pieces are there to avoid.
    """

    @staticmethod
    def forward(ctx: Any, packed: PackedAttention, scoring: _Scoring, *tensors: Tensor) -> Tensor:
        """Attend, a piece after the other."""
        ctx.save_for_backward(*tensors)
        ctx.packed, ctx.scoring = packed, scoring
        device = tensors[0].device.type
        ctx.autocast = torch.autocast(
            device,
            torch.get_autocast_dtype(device),
            torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        return packed.attend_in_pieces(scoring, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients; keys and values collect theirs from several pieces."""
        tensors, packed, scoring = ctx.saved_tensors, ctx.packed, ctx.scoring
        sums = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors
        ]
        for piece in packed.pieces(scoring.window):
            parts = [x.detach().requires_grad_() for x in piece.cut(*tensors)]
            with torch.enable_grad(), ctx.autocast:
                out = packed.attend_piece(piece, scoring, *parts)
            more = torch.autograd.grad(out, parts, grads[0][:, piece.start : piece.stop])
            for total, part in zip(piece.cut(*sums), more, strict=True):
                total += part
        return None, None, *(s.to(x.dtype) for s, x in zip(sums, tensors, strict=True))
