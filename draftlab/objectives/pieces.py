"""Which predictions meet the heads, and how many at a time: those that count for nothing meet none.

In: which of the predictions of N tokens from K depths are made. Out: chunks of tokens whose target
law is alive at a time, each with the pieces that a draft head predicts at once. Read
cut_into_pieces.
"""

from dataclasses import dataclass

import torch

from draftlab.shapes import Bool, Int, Tensor

Index = slice | Tensor  # a slice where rows are neighbours: that takes no copy


@dataclass(frozen=True, slots=True)
class Piece:
    """Predictions that one draft head makes at once, by depth and then by token.

    Attributes:
        head: number of the head.
        depths: of each.
        tokens: of each.
        rows: where each token's target law is in the chunk.
        judged: which of them enter the figures.
        spans: stretches of one depth among the judged.
    """

    head: int
    depths: Int[Tensor, " P"]
    tokens: Int[Tensor, " P"]
    rows: Index
    judged: Index
    spans: list[tuple[int, slice]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens whose target law is alive at a time, and who predicts them."""

    tokens: Index
    pieces: list[Piece]


def cut_into_pieces(
    made: Bool[Tensor, "K N"],
    *,
    judged: Bool[Tensor, " N"] | None,
    chunk_rows: int,
    num_heads: int,
) -> list[Chunk]:
    """Put the predictions that are made into chunks and pieces, on the processor.

    Depths that share a head also share pieces, so that few predictions of many depths cost what as
    many of one depth do.

    Args:
        made: True where depth k predicts token n; the others appear nowhere, and tokens that no
            depth predicts are in no chunk.
        judged: tokens whose predictions enter the figures; None is all.
        chunk_rows: most tokens of a chunk, and most predictions of a piece.
        num_heads: 1, shared by all depths, or K.
    """
    device = made.device
    here = made.cpu()  # the one transfer
    shown = torch.ones_like(here[0]) if judged is None else judged.cpu()
    chunks = []
    for tokens in here.any(0).nonzero().squeeze(1).split(chunk_rows):
        found = here[:, tokens].nonzero()
        groups = [found] if num_heads == 1 else [found[found[:, 0] == k] for k in range(num_heads)]
        pieces = [
            _piece(number, part[:, 0], part[:, 1], tokens, shown, device)
            for number, group in enumerate(groups)
            for part in group.split(chunk_rows)
            if part.numel()
        ]
        if pieces:
            chunks.append(Chunk(_index(tokens, device), pieces))
    return chunks


def _piece(
    head: int, depths: Tensor, rows: Tensor, tokens: Tensor, shown: Tensor, device: torch.device
) -> Piece:
    tokens = tokens[rows]
    judged = shown[tokens].nonzero().squeeze(1)
    spans, start = [], 0
    for depth, count in zip(
        *(x.tolist() for x in depths[judged].unique_consecutive(return_counts=True)), strict=True
    ):
        spans.append((depth, slice(start, start + count)))
        start += count
    return Piece(
        head,
        depths.to(device),
        tokens.to(device),
        _index(rows, device),
        _index(judged, device),
        spans,
    )


def _index(rows: Tensor, device: torch.device) -> Index:
    if rows.numel() and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows.to(device)
