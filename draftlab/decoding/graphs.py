"""Decoding with the round captured as a CUDA graph: one launch a round, a look every few rounds.

In: rows as `Decoder.generate` makes them. Out: `Generation`s. Prompts enter as always (prefill.py);
then stretches of rounds run on the device alone (static_round.py), and the host looks at what they
gave, lets finished rows go and new ones in. One graph for each (slots, draft shape, length bucket),
all in one memory pool; buffers and graphs are kept for the next call. Read `StaticRunner.run`.

Times: a stretch is timed as a whole and shared equally by its rounds, as `verify_s`; no stage can
be told apart inside a graph. A row's time ends with its own last round: what a stretch runs behind
it, because the host has not looked yet, is no decoding of that row.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from draftlab.decoding.batch import Batch
from draftlab.decoding.crossing import device_of
from draftlab.decoding.plan import DraftPlan
from draftlab.decoding.prefill import prefill
from draftlab.decoding.records import Generation, StepRecord
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.slots import Sequence as Row
from draftlab.decoding.static_round import DraftsStatically, StaticRound
from draftlab.decoding.timing import DeviceClock
from draftlab.decoding.verify import Rule
from draftlab.decoding.watching import Watchers
from draftlab.drafters.base import Drafter
from draftlab.errors import ConfigError, DraftlabError
from draftlab.sampling import Sampling
from draftlab.targets.target import Target

_SMALLEST_BUCKET = 256
_ROUNDS = 6  # between two looks of the host
_WARMUP_ROUNDS = 2
_KEPT_SESSIONS = 2  # memory and graphs of calls of other sizes or laws

OnTokens = Callable[[int, list[int], int], None]


def refuse_graphs(
    target: Target, drafter: Drafter | None, settings: DecodeSettings, plan: DraftPlan
) -> str | None:
    """Say why rounds cannot run on the device alone, or None when they can."""
    if target.report["kernels"] != "fast":
        return f"the {target.report['kernels']} kernels wait for the host; target.kernels=fast"
    if plan.is_budgeted or settings.min_confidence is not None:
        return "drafts whose length is chosen anew each round need the host"
    if settings.lossy:
        return "lossy rules run round by round"
    if settings.fallback:
        return "decode.fallback looks at the clock every round"
    if drafter is not None and not isinstance(drafter, DraftsStatically):
        return f"a {drafter.kind} drafter works on the host"
    if drafter is not None and device_of(drafter, target.device) != target.device:
        return "the drafter is on another device"
    return None


def wants_graphs(
    target: Target,
    drafter: Drafter | None,
    settings: DecodeSettings,
    plan: DraftPlan,
    *,
    has_listener: bool,
) -> bool:
    """Decide what `decode.graphs` means here.

    Args:
        target: whose rounds.
        drafter: or None.
        settings: say auto, on or off.
        plan: what is drafted.
        has_listener: somebody besides the drafter reads along.

    Raises:
        ConfigError: on, where there is no CUDA device or something needs the host.
    """
    if settings.graphs == "off":
        return False
    refusal = refuse_graphs(target, drafter, settings, plan)
    if has_listener:
        refusal = "a listener reads every round on the host"
    if target.device.type != "cuda":
        refusal = f"the target is on {target.device}, and graphs are CUDA's"
    if settings.graphs == "on" and refusal is not None:
        raise ConfigError(
            f"decode.graphs=on cannot take effect: {refusal}; decode.graphs=auto uses graphs where "
            "they can"
        )
    return refusal is None


def refuse_rows(rows: Sequence[Row]) -> str | None:
    """Say why these rows cannot share such rounds, or None when they can."""
    if any(row.stops is not None for row in rows):
        return "stop strings are looked for by the host"
    law = rows[0].sampling
    if any(row.sampling != law for row in rows):
        return "rows are sampled differently"
    if law.reads_context:
        return "penalties look at the text before"
    return None


@dataclass(slots=True)
class _Session:
    """Memory of some slots, the round over it, and its graphs by length bucket."""

    batch: Batch
    round: StaticRound
    capacity: int
    graphs: dict[int, Any] = field(default_factory=dict)


class StaticRunner:
    """Runs rows through stretches of device-only rounds."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: DecodeSettings,
        plan: DraftPlan,
        *,
        clock: DeviceClock,
        eos_ids: frozenset[int],
        captures: bool,
        rounds: int = _ROUNDS,
    ) -> None:
        """Choose what every run has in common.

        Args:
            target: with the fast kernels.
            drafter: with `static_rounds`, or None.
            settings: for the seed and prefill.
            plan: a chain or a tree.
            clock: of all times.
            eos_ids: tokens that end an answer.
            captures: False runs the same rounds eagerly, on any device.
            rounds: between two looks of the host.
        """
        self._target, self._drafter, self._settings, self._plan = target, drafter, settings, plan
        self._clock, self._eos, self._captures, self._rounds = clock, eos_ids, captures, rounds
        self._drafting = drafter.static_rounds() if isinstance(drafter, DraftsStatically) else None
        self._watchers = Watchers(drafter, None)
        self._sessions: dict[tuple[Any, ...], _Session] = {}
        self._pool: Any = None

    def run(
        self, rows: list[Row], batch_size: int, on_tokens: OnTokens | None, rule: Rule
    ) -> Iterator[Generation]:
        """Answer rows, in order of finishing.

        Args:
            rows: all sampled alike; see `refuse_rows`.
            batch_size: slots at most.
            on_tokens: called for every row and round, when the host looks.
            rule: for these rows.
        """
        waiting = deque(rows)
        with torch.inference_mode():
            session = self._open(rows, min(batch_size, len(rows)), rule)
        batch = session.batch
        while waiting or batch.live:
            finished = []
            with torch.inference_mode():
                self._let_in(batch, waiting)
                session.round.load(batch.live)
                while not finished:
                    finished = self._stretch(session, on_tokens)
                self._let_out(batch)
            yield from finished

    def _open(self, rows: list[Row], slots: int, rule: Rule) -> _Session:
        """Give memory for these rows: of an earlier call where it fits."""
        law = rows[0].sampling
        longest = max(len(row.prompt_ids) + row.limit for row in rows)
        # a tree is not cut to its answer's room: a row may end `depth` past it, and runs on as a
        # dummy until the host looks
        capacity = _bucket(longest + self._plan.depth + self._plan.num_nodes + 1)
        key = (slots, capacity, law, rule.name)
        session = self._sessions.get(key)
        if session is not None and not session.batch.live:
            return session
        self._sessions.pop(key, None)
        while len(self._sessions) >= _KEPT_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        batch = Batch(
            self._target,
            self._drafter,
            slots=slots,
            capacity=capacity,
            num_nodes=self._plan.num_nodes,
            seed=self._settings.seed,
            context=None,
        )
        self._sessions[key] = session = _Session(
            batch, self._make_round(batch, rule, law), capacity
        )
        return session

    def _make_round(self, batch: Batch, rule: Rule, law: Sampling) -> StaticRound:
        return StaticRound(
            self._target,
            self._drafting,
            kv=batch.kv,
            state=batch.state,
            needs=self._watchers.request,
            plan=self._plan,
            rule=rule,
            sampling=law,
            seed=self._settings.seed,
            eos_ids=sorted(self._eos),
            most_rounds=self._rounds,
        )

    def _let_in(self, batch: Batch, waiting: deque[Row]) -> None:
        entering = []
        while waiting and batch.free:
            row = waiting.popleft()
            row.slot, row.entered_s = batch.free.pop(), self._clock.read()
            entering.append(row)
        if entering:
            prefill(
                self._target,
                self._watchers,
                batch,
                entering,
                prefill_tokens=self._settings.prefill_tokens,
            )

    def _let_out(self, batch: Batch) -> None:
        if self._drafting is not None:
            self._drafting.settle(batch.state)
        leaving = batch.leave()
        if self._drafter is not None:
            self._drafter.close(batch.state, leaving)

    def _stretch(self, session: _Session, on_tokens: OnTokens | None) -> list[Generation]:
        """Run some rounds, then look at what they gave."""
        batch = session.batch
        # every round gives a row a token at least, so no row needs more rounds than it has room
        rounds = min(self._rounds, max(row.limit - len(row.output_ids) for row in batch.live))
        if any(row.is_fresh for row in batch.live):
            rounds = 1  # the first token's time is told apart
        reach = rounds * (self._plan.depth + 1) + self._plan.num_nodes + 1
        live = min(_bucket(max(row.base for row in batch.live) + reach), session.capacity)
        # streams and captures are the current device's, which need not be the target's
        with torch.cuda.device(self._target.device) if self._captures else nullcontext():
            if self._captures and live not in session.graphs:
                session.graphs[live] = self._capture(session.round, live)
            began = self._clock.read()
            session.round.restart_log()
            for _ in range(rounds):
                if self._captures:
                    session.graphs[live].replay()
                else:
                    session.round.run(live)
            told = session.round.read_log(rounds)
        if not any(map(any, told.kept)):
            raise DraftlabError(
                f"{rounds} rounds of {len(batch.live)} live rows on {self._target.device} gave no "
                "token, so they did not run; pass decode.graphs=off, and report it"
            )
        spent = (self._clock.read() - began) / rounds
        sharing = [sum(map(bool, kept)) for kept in told.kept]  # rows that had not ended yet
        finished = []
        for row in batch.live:
            tokens, now = iter(told.tokens[row.slot]), began
            for turn in range(rounds):
                kept = [next(tokens) for _ in range(told.kept[turn][row.slot])]
                if not kept:
                    break
                count = told.accepted[turn][row.slot]
                now += spent
                drafted = told.drafted[turn][row.slot]
                self._take(row, kept, count, drafted, spent, now, live=sharing[turn])
                if on_tokens is not None:
                    on_tokens(row.prompt_index, kept, min(count, len(kept)))
            if row.finish is not None:
                finished.append(row.as_generation(now, is_lossy=False))
        return finished

    def _take(
        self,
        row: Row,
        kept: list[int],
        count: int,
        drafted: int,
        spent: float,
        now: float,
        *,
        live: int,
    ) -> None:
        """Let the host's view of a row follow one round."""
        if row.is_fresh:
            row.first_token_at = now
        else:
            times = (0.0, spent, 0.0)
            row.steps.append(StepRecord(drafted, count, len(kept), (), *times, live))
        row.emit(kept, self._eos)
        row.base += count + 1
        row.rounds += 1
        row.anchor = kept[-1]  # of a row that goes on, nothing was cut

    def _capture(self, static_round: StaticRound, live: int) -> Any:
        """Record the round as a graph, after rounds in which every row counts as done."""
        facts = static_round.facts
        was_done = facts.is_done.clone()
        facts.is_done.fill_(True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUP_ROUNDS):
                static_round.restart_log()
                static_round.run(live)
        torch.cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        static_round.restart_log()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            static_round.run(live)
        facts.is_done.copy_(was_done)
        return graph


def _bucket(length: int) -> int:
    """Give the smallest bucket that holds a length: 256, 512, 1024, ..."""
    size = _SMALLEST_BUCKET
    while size < length:
        size *= 2
    return size
