"""Which positions a row attends to while training: always some that follow one another.

A row's context lies in its own sample, ends where the row stands, and may begin at a sliding window
instead of the sample's first position. Two numbers a row say all that; no T x T mask is made. Read
Spans, then past_spans and block_spans.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from draftlab.shapes import Int, Tensor

# rows computed at once: their scores, for all heads, should stay in a core's cache
_PIECE_ROWS = 64
_BLOCK = 128  # rows and keys of a tile of FlexAttention


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence that stand near each other, and the keys between their ends.

    Attributes:
        batch_row: whose.
        rows: the rows.
        start: first key that any of them sees.
        stop: one past the last.
        all_from: no row's first key is after it.
        all_until: no row's end is before it.
    """

    batch_row: int
    rows: Int[Tensor, " N"]
    start: int
    stop: int
    all_from: int
    all_until: int


@dataclass(frozen=True, eq=False)
class Spans:
    """For every row the keys it sees, first..end-1; none where first >= end.

    Attributes:
        first: first key a row sees.
        end: one past the last.
        num_keys: T.
    """

    first: Int[Tensor, "B A"]
    end: Int[Tensor, "B A"]
    num_keys: int

    @cached_property
    def pieces(self) -> list[Piece]:
        """Give the rows that see anything, a few at a time in the order of their ends."""
        order = self.end.argsort(dim=1, stable=True)
        rows = order.split(_PIECE_ROWS, dim=1)
        first, end = (x.gather(1, order).split(_PIECE_ROWS, dim=1) for x in (self.first, self.end))
        bounds = [
            torch.stack([a.amin(1), b.amax(1), a.amax(1), b.amin(1)], dim=1).tolist()
            for a, b in zip(first, end, strict=True)
        ]
        return [
            Piece(b, some[b], *bounds[i][b])
            for b in range(order.shape[0])
            for i, some in enumerate(rows)
            if bounds[i][b][0] < bounds[i][b][1]
        ]

    @cached_property
    def block_mask(self) -> BlockMask:
        """Give what FlexAttention needs: tiles to skip, tiles to take whole, and who sees what.

        Equals `create_block_mask`, which would first write down the T x T mask.
        """
        first, end = self.first.to(torch.int32), self.end.to(torch.int32)
        starts = torch.arange(0, self.num_keys, _BLOCK, device=first.device)
        low, high = first.unsqueeze(2), end.unsqueeze(2)
        some = (low < high) & (low < starts + _BLOCK) & (high > starts)
        every = (low <= starts) & (high >= starts + _BLOCK)
        missing = -first.shape[1] % _BLOCK
        tiles = [F.pad(x, (0, 0, 0, missing)).unflatten(1, (-1, _BLOCK)) for x in (some, every)]
        is_full = tiles[1].all(2)
        is_partial = tiles[0].any(2) & ~is_full
        counts, indices = zip(*(_list_tiles(x) for x in (is_partial, is_full)), strict=True)
        return BlockMask.from_kv_blocks(
            counts[0],
            indices[0],
            counts[1],
            indices[1],
            BLOCK_SIZE=_BLOCK,
            mask_mod=lambda b, _, row, key: (key >= first[b, row]) & (key < end[b, row]),
            seq_lengths=(first.shape[1], self.num_keys),
        )


def _list_tiles(taken: Tensor) -> tuple[Tensor, Tensor]:
    """Count and list the tiles taken of every row of tiles, those not taken after them."""
    marks = taken.unsqueeze(1).to(torch.int32)
    listed = marks.argsort(dim=-1, descending=True, stable=True)
    return marks.sum(-1, dtype=torch.int32), listed.to(torch.int32)


def past_spans(
    segment_ids: Int[Tensor, "B T"],
    index: Int[Tensor, "B A"],
    *,
    window: int | None = None,
    ahead: int = 0,
) -> Spans:
    """Let rows see their own sample up to the position they were made at.

    Args:
        segment_ids: of every position; a sample's positions follow one another.
        index: position of each row.
        window: positions a row may look back to, itself included; None means all.
        ahead: positions that a row, a draft, stands after the one it was made at.
    """
    first = sample_starts(segment_ids).gather(1, index)
    if window is not None:
        first = first.maximum(index + (ahead - window + 1))
    return Spans(first, index + 1, segment_ids.shape[1])


def block_spans(
    segment_ids: Int[Tensor, "B T"], index: Int[Tensor, "B A"], slots: int, window: int | None
) -> Spans:
    """Let the slots of blocks see their own sample strictly before the block's anchor.

    Args:
        segment_ids: of every position; a sample's positions follow one another.
        index: position of each block's anchor, which its slot 0 stands at.
        slots: S, of a block.
        window: positions a slot may look back to, itself included; None means all.

    Returns:
        Spans of A * S rows, block after block.
    """
    first = sample_starts(segment_ids).gather(1, index).unsqueeze(2).expand(-1, -1, slots)
    if window is not None:
        steps = torch.arange(slots, device=index.device)
        first = first.maximum(index.unsqueeze(2) + steps - (window - 1))
    end = index.unsqueeze(2).expand_as(first)
    return Spans(first.flatten(1), end.flatten(1), segment_ids.shape[1])


def sample_starts(segment_ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Give for every position the first one of its sample; padding counts as one."""
    order = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return torch.where(begins, order, 0).cummax(dim=1).values
