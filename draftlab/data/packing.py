"""Samples, cut to length and packed into rows.

In: encoded samples. Out: `PackedRow`s, and from those the `TokenBatch` (and features) of a step.
Read first: `pack`, then `collate`. A sample is never spread over two rows.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open

from draftlab.data.batch import TokenBatch
from draftlab.data.feature_bytes import take_vectors
from draftlab.errors import DataError
from draftlab.shapes import Bool, Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to learn from.

    Attributes:
        sample_id: unique, 0 or more; key of all randomness.
        domain: figures are reported by it.
        ids: target ids.
        mask: True where the target spoke.
        features_path: file with the target's captured hidden states, or None.
        features_slot: place of this sample in that file.
    """

    sample_id: int
    domain: str
    ids: Int[Tensor, " T"]
    mask: Bool[Tensor, " T"]
    features_path: Path | None = None
    features_slot: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_learned(self) -> int:
        """Tokens that are learned: those of the answer, except one that nothing comes before."""
        return int(self.mask[1:].sum())

    def load_features(self) -> tuple[Float[Tensor, "T L D"] | None, Float[Tensor, "T D"] | None]:
        """Load taps and final hidden states from the mapped file; None for what was not captured.

        The last token of an answer was never read by the target: its rows are zeros, and nothing
        is predicted from them.

        Raises:
            DataError: this sample has no captured features.
        """
        if self.features_path is None or self.features_slot is None:
            raise DataError(
                f"sample {self.sample_id} has no captured features; capture them while answering, "
                "or compute them in training"
            )
        with safe_open(self.features_path, framework="pt") as file:
            offsets = file.get_tensor("offsets")
            start, end = offsets[self.features_slot : self.features_slot + 2].tolist()
            end = min(end, start + len(self))
            found = [take_vectors(name, start, end, file) for name in ("taps", "final")]
        padded = [None if part is None else _pad_rows(part, len(self)) for part in found]
        return padded[0], padded[1]


@dataclass(frozen=True, slots=True)
class CutResult:
    """Samples within the limit, and what the cut cost.

    Attributes:
        samples: those with something left to learn, in order.
        num_cut: samples that were too long (the lost ones included).
        lost: samples that had nothing left to learn after the cut.
    """

    samples: list[Sample]
    num_cut: int
    lost: list[Sample]


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Samples that share one row, in order of their ids."""

    samples: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in use."""
        return sum(len(sample) for sample in self.samples)


def cut_samples(samples: Sequence[Sample], max_tokens: int) -> CutResult:
    """Cut samples to a length; ids and mask alike, and no end token is invented (case O-05)."""
    kept, lost, num_cut = [], [], 0
    for sample in samples:
        if len(sample) > max_tokens:
            num_cut += 1
            sample = replace(sample, ids=sample.ids[:max_tokens], mask=sample.mask[:max_tokens])
            if not sample.num_learned:
                lost.append(sample)
                continue
        kept.append(sample)
    return CutResult(kept, num_cut, lost)


def pack(samples: Sequence[Sample], max_tokens: int) -> list[PackedRow]:
    """Fit samples into as few rows as best-fit decreasing finds; equal input, equal rows.

    Args:
        samples: none longer than a row (see `cut_samples`).
        max_tokens: length of a row, tokens.

    Raises:
        DataError: a sample is longer than a row.
    """
    rows: list[list[Sample]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for sample in sorted(samples, key=lambda s: (-len(s), s.sample_id)):
        if len(sample) > max_tokens:
            raise DataError(
                f"sample {sample.sample_id} has {len(sample)} tokens but a row holds "
                f"{max_tokens}; cut the samples first, or raise max_tokens"
            )
        place = bisect.bisect_left(room, (len(sample), 0))
        if place < len(room):
            left, row = room.pop(place)
        else:
            left, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(sample)
        bisect.insort(room, (left - len(sample), row))
    return [PackedRow(tuple(sorted(row, key=lambda s: s.sample_id))) for row in rows]


def collate(rows: Sequence[PackedRow], length: int | None = None) -> TokenBatch:
    """Lay rows side by side; what is padding is told by lengths, never by an id (case O-10).

    Args:
        rows: B rows.
        length: T, or None for the longest row.
    """
    width = _width(rows, length)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    positions = torch.zeros(len(rows), width, dtype=torch.int64)
    segment_ids = torch.full((len(rows), width), -1)
    sample_ids = torch.full((len(rows), width), -1)
    for b, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row.samples):
            end = start + len(sample)
            input_ids[b, start:end] = sample.ids
            loss_mask[b, start:end] = sample.mask
            positions[b, start:end] = torch.arange(len(sample))
            segment_ids[b, start:end] = segment
            sample_ids[b, start:end] = sample.sample_id
            start = end
    return TokenBatch(input_ids, loss_mask, positions, segment_ids, sample_ids)


def collate_features(
    rows: Sequence[PackedRow], length: int | None = None
) -> tuple[Float[Tensor, "B T L D"] | None, Float[Tensor, "B T D"] | None]:
    """Load captured taps and final hidden states in the layout of `collate`; zeros elsewhere.

    Raises:
        DataError: samples without captured features, or captured in different ways.
    """
    width = _width(rows, length)
    loaded = [[sample.load_features() for sample in row.samples] for row in rows]
    laid = []
    for which in (0, 1):
        parts = [[features[which] for features in row] for row in loaded]
        flat = [part for row in parts for part in row]
        first = flat[0] if flat else None
        if any((part is None) != (first is None) for part in flat):
            raise DataError(
                "some samples of a batch have captured features and some have not; train on "
                "answers captured with one feature request, or compute features in training"
            )
        if first is None:
            laid.append(None)
            continue
        out = torch.zeros(len(rows), width, *first.shape[1:], dtype=first.dtype)
        for b, row in enumerate(parts):
            joined = torch.cat([first[:0], *(part for part in row if part is not None)])
            out[b, : len(joined)] = joined
        laid.append(out)
    return laid[0], laid[1]


def _width(rows: Sequence[PackedRow], length: int | None) -> int:
    longest = max(row.num_tokens for row in rows)
    if length is not None and length < longest:
        raise DataError(f"a row of {longest} tokens does not fit a batch of length {length}")
    return longest if length is None else length


def _pad_rows(part: Tensor, length: int) -> Tensor:
    missing = length - len(part)
    return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
