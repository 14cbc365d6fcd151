"""Observations kept back while a drafter rests, to be shown at once before it drafts again.

Any chunking of `observe` gives the same state (the drafter contract), so a pause in drafting need
not cost a drafter pass every round.
"""

import torch

from draftlab.drafters.base import Observation
from draftlab.shapes import Tensor

_MOST_POSITIONS = 64


class Deferred:
    """Observations of one set of rows, one position a row each, in order."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._kept: list[Observation] = []

    @property
    def is_full(self) -> bool:
        """True when so much is kept that it should be shown now."""
        return len(self._kept) >= _MOST_POSITIONS

    def keep(self, seen: Observation) -> None:
        """Keep one position of each row; the rows must be those of what is kept already."""
        assert not self._kept or self._kept[0].rows.shape == seen.rows.shape
        self._kept.append(seen)

    def take(self) -> Observation | None:
        """Give everything kept as one observation, and forget it."""
        kept, self._kept = self._kept, []
        if len(kept) < 2:
            return kept[0] if kept else None
        return Observation(
            rows=kept[0].rows,
            ids=torch.cat([seen.ids for seen in kept], dim=1),
            lengths=torch.stack([seen.lengths for seen in kept]).sum(0),
            next_ids=torch.cat([seen.next_ids for seen in kept], dim=1),
            taps=_join([seen.taps for seen in kept]),
            final=_join([seen.final for seen in kept]),
        )


def _join(parts: list[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known, dim=1) if known else None
