"""Drafting without the host: what a round that runs on the device alone needs of a drafter.

A drafter with device-only methods gives them by `static_rounds()`; decoding asks for that method by
its name (decoding/static_round.py says what it must do). Read AlreadyStatic: for drafters whose
ordinary methods never wait for the device.
"""

from typing import Any

from draftlab.drafters.base import DraftBudget, Drafter, Observation
from draftlab.drafters.tree import DraftTree
from draftlab.shapes import Float, Tensor


class AlreadyStatic:
    """The ordinary methods of a drafter that keeps nothing on the host."""

    def __init__(self, drafter: Drafter) -> None:
        """Keep the drafter."""
        self._drafter = drafter

    def propose(
        self, state: Any, budget: DraftBudget, uniforms: Float[Tensor, "R N"], *, live: int
    ) -> DraftTree:
        """Propose for all rows, chains or the tree asked for; `live` bounds nothing here."""
        return self._drafter.propose(state, budget, uniforms)

    def observe(self, state: Any, seen: Observation, *, live: int) -> None:
        """Take in accepted positions."""
        self._drafter.observe(state, seen)

    def settle(self, state: Any) -> None:
        """Nothing to bring to the host."""
