"""Who reads along: the drafter and a listener see every position the target has processed, once.

In: positions and hidden states of a pass. Out: `Observation`s, each with the hidden states its
reader asked for. While drafting rests, the drafter's are kept back and shown together.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from draftlab.decoding import crossing
from draftlab.decoding.deferred import Deferred
from draftlab.drafters.base import Drafter, Observation
from draftlab.shapes import Int, Tensor
from draftlab.targets.features import FeatureRequest, TargetFeatures


@runtime_checkable
class Listener(Protocol):
    """Something that reads along without changing anything, such as the feature recorder."""

    @property
    def needs(self) -> FeatureRequest:
        """Hidden states it wants to see."""
        ...

    def observe(self, prompt_indices: list[int], seen: Observation) -> None:
        """Take in processed positions; `prompt_indices` follows the rows."""
        ...


class Watchers:
    """The drafter and the listener, either of which may be missing."""

    def __init__(self, drafter: Drafter | None, listener: Listener | None) -> None:
        """Ask both what they need to see."""
        self._drafter = drafter
        self._listener = listener
        self._drafter_needs = drafter.needs if drafter else FeatureRequest()
        self._listener_needs = listener.needs if listener else FeatureRequest()
        self.request = self._drafter_needs.union(self._listener_needs)
        self._deferred = Deferred()

    @property
    def are_there(self) -> bool:
        """False when nobody reads along."""
        return self._drafter is not None or self._listener is not None

    def show(
        self,
        state: Any,
        prompt_indices: Sequence[int],
        rows: Int[Tensor, " R"],
        ids: Int[Tensor, "R W"],
        lengths: Int[Tensor, " R"],
        next_ids: Int[Tensor, "R W"],
        features: TargetFeatures,
        *,
        defers: bool = False,
    ) -> None:
        """Show processed positions to both.

        Args:
            state: the drafter's.
            prompt_indices: whose positions, for the listener.
            rows: slots, unique.
            ids: token at each position, right-padded.
            lengths: positions that count.
            next_ids: the token after each position.
            features: what the pass gave for `request`.
            defers: True keeps the drafter's share back; one position a row then.
        """
        if self._drafter is not None:
            part = _select(features, self.request, self._drafter_needs)
            seen = Observation(rows, ids, lengths, next_ids, part.taps, part.final)
            if defers:
                self._deferred.keep(seen)
                if self._deferred.is_full:
                    self.catch_up(state)
            else:
                self.catch_up(state)
                crossing.observe(self._drafter, state, seen)
        if self._listener is not None:
            part = _select(features, self.request, self._listener_needs)
            seen = Observation(rows, ids, lengths, next_ids, part.taps, part.final)
            self._listener.observe(list(prompt_indices), seen)

    def forget(self) -> None:
        """Drop what was kept back in a run that was broken off."""
        self._deferred.take()

    def catch_up(self, state: Any) -> None:
        """Show the drafter what was kept back: before it drafts, and before rows come or go."""
        kept = self._deferred.take()
        if kept is not None and self._drafter is not None:
            crossing.observe(self._drafter, state, kept)


def _select(
    features: TargetFeatures, given: FeatureRequest, wanted: FeatureRequest
) -> TargetFeatures:
    """Cut the union of two requests down to one of them."""
    taps = features.taps
    if not wanted.tap_layers:
        taps = None
    elif taps is not None and wanted.tap_layers != given.tap_layers:
        index = [given.tap_layers.index(k) for k in wanted.tap_layers]
        taps = taps[:, :, index]
    return TargetFeatures(taps, features.final if wanted.wants_final else None)
