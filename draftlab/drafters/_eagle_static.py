"""An EAGLE head in rounds that run on the device alone: no length is known to the host.

The same steps as in `_eagle_memory.py`, over all slots in order, with a bound on lengths in place
of the lengths themselves. Read StaticHead.propose.
"""

from collections.abc import Callable

import torch

from draftlab.drafters._chain import Chain
from draftlab.drafters._eagle_layer import NewPositions
from draftlab.drafters._eagle_memory import Feed, HeadMemory, grow_tree
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.tree import DraftTree
from draftlab.shapes import Float, Int, Tensor

# (memory, positions processed) -> the features that the head reads there [R W D]
Features = Callable[[HeadMemory, Observation], Tensor]


class StaticHead:
    """Drafts and observations of one head, without a look from the host."""

    def __init__(self, feed: Feed, features: Features) -> None:
        """Take the head's network."""
        self._feed = feed
        self._features = features

    def propose(
        self, state: HeadMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"], *, live: int
    ) -> DraftTree:
        """Draft a chain for every slot, or the tree that the budget asks for.

        Args:
            state: of all slots.
            budget: rows are all slots in order; no confidence is asked for.
            uniforms: numbers in [0, 1), one a node.
            live: no row's memory is longer, this round's own positions included.
        """
        if budget.tree is not None:
            longest = min(live, state.capacity + 1)
            return grow_tree(
                state, budget, uniforms, self._feed, longest=longest, shortest=0, is_prefix=True
            )
        rows, depth, lengths = budget.rows, budget.num_draft_tokens, state.lengths
        hidden, logits = state.hidden.unsqueeze(1), state.logits.unsqueeze(1)
        chain = Chain(budget, uniforms, state.ids)
        for k in range(depth):
            if k > 0:
                positions = (lengths + (k - 1)).clamp_max(state.capacity).unsqueeze(1)
                where = _place(state, rows, positions, live)
                hidden, logits = self._feed(state, where, chain.newest.unsqueeze(1), hidden)
            chain.choose(logits[:, 0])
        return chain.finish((state.capacity - 1 - lengths).clamp(0, depth) * (lengths > 0))

    def observe(self, state: HeadMemory, seen: Observation, *, live: int) -> None:
        """Write keys and values by true features; keep the last position's output.

        Args:
            state: of all slots.
            seen: rows are all slots in order; a length of 0 changes nothing.
            live: as in `propose`.
        """
        columns = torch.arange(seen.ids.shape[1], device=seen.ids.device)
        positions = (state.lengths.unsqueeze(1) + columns).clamp_max(state.capacity)
        last = (seen.lengths - 1).clamp_min(0)
        where = _place(state, seen.rows, positions, live, last)
        fed, logits = self._feed(state, where, seen.next_ids, self._features(state, seen))
        has_new = (seen.lengths > 0).unsqueeze(1)
        state.hidden.copy_(torch.where(has_new, fed[:, 0], state.hidden))
        state.logits.copy_(torch.where(has_new, logits[:, 0], state.logits))
        state.lengths.add_(seen.lengths)

    def settle(self, state: HeadMemory) -> None:
        """Let the host know the lengths again, before rows come or go."""
        state.committed = state.lengths.tolist()


def _place(
    state: HeadMemory,
    rows: Int[Tensor, " R"],
    positions: Int[Tensor, "R W"],
    live: int,
    last: Int[Tensor, " R"] | None = None,
) -> NewPositions:
    return NewPositions(
        rows=rows,
        positions=positions,
        live=min(live, state.capacity + 1),
        is_prefix=True,
        is_level=False,
        last=last,
        window=state.window,
    )
