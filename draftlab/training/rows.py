"""The packed rows training reads, and the batches made of them.

In: packed rows, with or without captured features. Out: a `TokenBatch` and the `TargetFeatures` a
drafter asks for, from files where they were captured, else from a pass of the frozen target.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from draftlab.data.batch import TokenBatch
from draftlab.data.packing import PackedRow, collate, collate_features
from draftlab.errors import DataError
from draftlab.shapes import Tensor
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.target import Target

_EMPTY = PackedRow(())
_WIDTH_STEP = 64  # few different widths, so that memory blocks are reused


class TrainingRows:
    """Packed rows by number; None stands for a row that holds padding only."""

    def __init__(self, rows: Sequence[PackedRow], *, captured: FeatureRequest | None) -> None:
        """Check that there is something to learn (case O-08).

        Args:
            rows: the data, each row no longer than the model allows.
            captured: what the samples' feature files hold; None: features are computed in training.

        Raises:
            DataError: no token of any row is learned.
        """
        self._rows = rows
        self._captured = captured
        self.num_sequences = [sum(s.num_learned > 0 for s in row.samples) for row in rows]
        if sum(self.num_sequences) == 0:
            raise DataError(
                f"no token to learn in {len(rows)} rows: no sample has an answer token that "
                "another token comes before; look at the data report of draftlab check"
            )

    def __len__(self) -> int:
        return len(self._rows)

    def num_tokens(self, rows: Sequence[int]) -> int:
        """Count tokens in use, padding left out."""
        return sum(self._rows[row].num_tokens for row in rows)

    def checksum(self) -> str:
        """Fingerprint of ids, masks and packing: equal data give equal training."""
        digest = hashlib.sha256()
        for row in self._rows:
            digest.update(b"row")
            for sample in row.samples:
                digest.update(f"{sample.sample_id}:{len(sample)}".encode())
                digest.update(sample.ids.to(torch.int64).numpy().tobytes())
                digest.update(sample.mask.numpy().tobytes())
        return digest.hexdigest()

    def tokens(self, rows: Sequence[int | None]) -> TokenBatch:
        """Lay rows side by side, as wide as the longest needs."""
        packed = self._pick(rows)
        return collate(packed, _width(packed))

    def features(
        self, rows: Sequence[int | None], batch: TokenBatch, needs: FeatureRequest, target: Target
    ) -> TargetFeatures:
        """Give the target's hidden states for a batch, on the batch's device.

        Args:
            rows: the rows of the batch; at least one is not None, and None comes last.
            batch: the same rows as tokens.
            needs: what the drafter reads.
            target: runs when nothing was captured; no gradient ever flows into it.

        Raises:
            DataError: captured features lack something that is needed.
        """
        if not _reads_anything(needs):
            return TargetFeatures(None, None)
        if self._captured is None:
            with torch.no_grad():
                return target.read_features(batch, needs).to(batch.input_ids.device)
        packed = self._pick(rows)
        filled = [row for row in packed if row.samples]
        taps, final = collate_features(filled, batch.input_ids.shape[1])
        num_empty = len(packed) - len(filled)
        # written in fewer bits perhaps: drafters meet the target's own dtype, as in its own pass
        place = {"dtype": target.dtype, "device": batch.input_ids.device}
        return TargetFeatures(
            _finish(_select(taps, self._captured, needs), num_empty, place),
            _finish(final if needs.wants_final else None, num_empty, place),
        )

    def skip_features(self, needs: FeatureRequest, target: Target) -> None:
        """Stand by where `features` of the other processes may run a pass of the target."""
        if self._captured is None and _reads_anything(needs):
            target.skip_pass()

    def check_captured(self, needs: FeatureRequest) -> None:
        """Refuse captured features that lack something a drafter needs.

        Raises:
            DataError: naming what is missing.
        """
        captured = self._captured
        if captured is not None and captured.union(needs) != captured:
            raise DataError(
                f"the captured features hold taps {list(captured.tap_layers)} and "
                f"{_final_word(captured)}, but the drafter needs taps {list(needs.tap_layers)} and "
                f"{_final_word(needs)}; capture again for this drafter, or train without captured "
                "features"
            )

    def _pick(self, rows: Sequence[int | None]) -> list[PackedRow]:
        return [_EMPTY if row is None else self._rows[row] for row in rows]


def _reads_anything(needs: FeatureRequest) -> bool:
    return bool(needs.tap_layers) or needs.wants_final


def _width(packed: Sequence[PackedRow]) -> int:
    longest = max(row.num_tokens for row in packed)
    return max(1, -(-longest // _WIDTH_STEP)) * _WIDTH_STEP


def _select(taps: Tensor | None, captured: FeatureRequest, needs: FeatureRequest) -> Tensor | None:
    if taps is None or not needs.tap_layers:
        return None
    if captured.tap_layers == needs.tap_layers:
        return taps
    return taps[:, :, [captured.tap_layers.index(layer) for layer in needs.tap_layers]]


def _finish(part: Tensor | None, num_empty: int, place: dict[str, Any]) -> Tensor | None:
    if part is None:
        return None
    if num_empty:
        part = torch.cat([part, part.new_zeros(num_empty, *part.shape[1:])])
    return part.to(**place)


def _final_word(request: FeatureRequest) -> str:
    return "the final hidden state" if request.wants_final else "no final hidden state"
