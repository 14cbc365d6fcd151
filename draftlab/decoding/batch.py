"""Who lives in which slot, and the same facts as tensors, carried from round to round.

Read Batch.settle: after rows have entered or left, it rebuilds the tensors from the host's view;
between such moments `advance` moves them along on the device.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from draftlab.decoding.slots import Sequence as Row
from draftlab.drafters.base import Drafter
from draftlab.drafters.tree import Verdict
from draftlab.randomness import Purpose, uniforms
from draftlab.sampling import ContextTracker, Sampling, SamplingRows
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.target import Target

_ROUND_PURPOSES = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESAMPLE)
_ROUNDS_AHEAD = 8


class Batch:
    """Buffers of a run, the rows in flight and what is known of them.

    Attributes:
        kv: the target's memory.
        state: the drafter's, or None.
        context: what penalties look at, or None when no row has any.
        live: rows in flight, by slot.
        free: empty slots, the lowest last.
        slots: of the live rows.
        base: committed length of each live row.
        anchors: newest token of each.
        laws: how each is sampled.
        draft_laws: the same without what only the target's ids and counts give a meaning.
        is_greedy: True when all are.
    """

    slots: Int[Tensor, " R"]
    base: Int[Tensor, " R"]
    anchors: Int[Tensor, "R 1"]
    laws: Sampling | SamplingRows
    draft_laws: Sampling | SamplingRows
    is_greedy: bool

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        slots: int,
        capacity: int,
        num_nodes: int,
        seed: int,
        context: ContextTracker | None,
    ) -> None:
        """Allocate memory for `slots` rows of at most `capacity` tokens, drafts included.

        Args:
            target: whose memory.
            drafter: whose state.
            slots: rows that may live at once.
            capacity: longest row, tokens, the drafts behind its end included.
            num_nodes: draft nodes a row at most.
            seed: root of the draws.
            context: what penalties look at.
        """
        self._device = target.device
        self._seed = seed
        self.kv = target.open_kv(slots, capacity)
        self.state: Any = drafter.open(slots, capacity, self.kv) if drafter else None
        self.context = context
        self.live: list[Row] = []
        self.free = list(reversed(range(slots)))
        self._zeros: dict[int, Tensor] = {}
        self._drawn: Tensor | None = None
        self._turn = 0  # of the rounds in `_drawn`
        self._width = max(1, num_nodes)
        self._purposes = self.ints(_ROUND_PURPOSES).unsqueeze(1)
        self._columns = torch.arange(capacity + _ROUNDS_AHEAD, device=self._device)

    def enter(self, rows: Sequence[Row]) -> None:
        """Let prefilled rows take part in rounds."""
        if self.context is not None:
            for row in rows:
                self.context.enter(row.slot, row.text_ids)
        self.live = sorted([*self.live, *rows], key=lambda row: row.slot)
        self.settle()

    def leave(self) -> Int[Tensor, " R"]:
        """Let finished rows go and give their slots back."""
        leaving = [row.slot for row in self.live if row.finish is not None]
        self.live = [row for row in self.live if row.finish is None]
        self.free = sorted([*self.free, *leaving], reverse=True)
        if self.context is not None:
            for slot in leaving:
                self.context.leave(slot)
        self.settle()
        return self.ints(leaving)

    def settle(self) -> None:
        """Make the tensors anew from what the host knows of the live rows."""
        if not self.live:
            return
        facts = self.ints(
            [
                (row.slot, row.base, row.anchor, row.key, row.rounds, len(row.output_ids))
                for row in self.live
            ]
        )
        self.slots, self.base, anchors, self._keys, self._turns, self._places = facts.unbind(1)
        self.anchors = anchors.unsqueeze(1)
        laws = [row.sampling for row in self.live]
        self.is_greedy = all(law.is_greedy for law in laws)
        self.laws = self._join(laws)
        # a drafter keeps no counts, and may have ids of its own
        self.draft_laws = self._join([replace(law.context_free, logit_bias=()) for law in laws])
        self._zeros, self._drawn = {}, None
        self._none = torch.zeros_like(self.slots)
        self._no_path = self._none.new_zeros(len(self.live), 0)

    def advance(self, verdict: Verdict) -> None:
        """Move every live row past its accepted run and its next token."""
        moved = verdict.num_accepted + 1
        self.base = self.base + moved
        self._places = self._places + moved
        self._turns = self._turns + 1
        self._turn += 1
        self.anchors = verdict.next_token.unsqueeze(1)

    def uniforms(self, purpose: Purpose, count: int) -> Float[Tensor, "R N"]:
        """Give this round's numbers in [0, 1) for some purpose; zeros when nothing is drawn."""
        if self.is_greedy:
            if count not in self._zeros:
                self._zeros[count] = torch.zeros(
                    len(self.live), count, dtype=torch.float64, device=self._device
                )
            return self._zeros[count]
        if self._drawn is None or self._turn >= _ROUNDS_AHEAD:
            # all purposes of several rounds at once: dozens of small operations, however many
            keys, first = (key.view(-1, 1, 1, 1) for key in (self._keys, self._turns))
            turns = first + self.columns(_ROUNDS_AHEAD).view(-1, 1, 1)
            columns = self.columns(self._width)
            self._drawn = uniforms(self._seed, keys, turns, columns, self._purposes)
            self._turn = 0
        return self._drawn[:, self._turn, _ROUND_PURPOSES.index(purpose), :count]

    def nothing_accepted(self, next_token: Int[Tensor, " R"]) -> Verdict:
        """Give the verdict of a round without drafts."""
        return Verdict(self._no_path, self._none, next_token)

    def uniforms_by_place(self, depths: Int[Tensor, "#R T"]) -> Float[Tensor, "R T"]:
        """Give numbers keyed by the place in the answer: equal with and without drafts."""
        places = self._places.unsqueeze(1) + depths
        return uniforms(self._seed, self._keys.unsqueeze(1), places, Purpose.SAMPLE)

    def _join(self, laws: list[Sampling]) -> Sampling | SamplingRows:
        alike = all(law == laws[0] for law in laws)
        return laws[0] if alike else SamplingRows.of(laws, self._device)

    def columns(self, count: int) -> Int[Tensor, " N"]:
        """Give 0..count-1."""
        return self._columns[:count]

    def ints(self, values: Sequence[Any]) -> Int[Tensor, "..."]:
        """Put integers on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self._device)
