"""The engine: prefill, then rounds of draft, verify, commit, until every answer is out.

In: a target, a drafter or None, prompts. Out: `Generation`s. Rows are ragged: each has its own
length, nothing is ever realigned, rejected drafts are overwritten by the next pass. Rows enter and
leave while others run. Without a drafter the same rounds are plain autoregressive decoding: the
baseline runs through the same kernels.

Read `Decoder._round` first; then proposing.py (what is drafted), judging.py (what stays) and
watching.py (what the drafter sees of it).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from draftlab.decoding import crossing
from draftlab.decoding.batch import Batch
from draftlab.decoding.committing import Outcome, fetch_outcome, show_path
from draftlab.decoding.costs import TimeCurve, doubling_widths, measure_time_curve
from draftlab.decoding.fallback import Fallback
from draftlab.decoding.geometry import place_nodes
from draftlab.decoding.graphs import StaticRunner, refuse_rows, wants_graphs
from draftlab.decoding.judging import Judge, list_overlaps
from draftlab.decoding.plan import make_plan
from draftlab.decoding.prefill import prefill
from draftlab.decoding.proposing import Proposer
from draftlab.decoding.records import Generation, StepRecord
from draftlab.decoding.requests import make_rows
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.slots import Sequence as Row
from draftlab.decoding.stops import StopStrings
from draftlab.decoding.timing import DeviceClock
from draftlab.decoding.watching import Listener, Watchers
from draftlab.drafters.base import Drafter
from draftlab.drafters.tree import DraftTree, DynamicTree
from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.sampling import ContextTracker, Sampling
from draftlab.targets.step import Step
from draftlab.targets.target import Target

__all__ = ["Decoder", "Listener"]

OnTokens = Callable[[int, list[int], int], None]


class Decoder:
    """Decodes prompts with a target and, if given, a drafter; output law is the target's alone."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        settings: DecodeSettings,
        *,
        listener: Listener | None = None,
        clock: DeviceClock | None = None,
        wants_overlaps: bool = False,
    ) -> None:
        """Check that this target, drafter and rule go together.

        Args:
            target: whose law is kept.
            drafter: proposes tokens; None decodes plainly.
            settings: see conf/decode/greedy.yaml.
            listener: reads along.
            clock: of all times; a fake one in tests.
            wants_overlaps: fill `StepRecord.overlaps`.

        Raises:
            UnsupportedTarget: this target's cache cannot be rolled back exactly.
            ConfigError: a rule that the sampling makes meaningless, or a draft shape that this
                drafter does not propose.
        """
        if target.speculation_refusal is not None:
            raise UnsupportedTarget(
                f"target {target.spec.name} cannot be decoded here: {target.speculation_refusal}; "
                "training and export still work for it"
            )
        self.target = target
        self.drafter = drafter
        self.settings = settings
        self.plan = make_plan(settings, drafter)
        self.clock = clock or DeviceClock(target.device)
        is_tree = self.plan.shape is not None
        self._judge = Judge(
            settings,
            has_drafter=drafter is not None,
            is_tree=is_tree,
            # a shape that depends on all nodes may not depend on draws; see proposing.py
            draws=not isinstance(self.plan.shape, DynamicTree),
        )
        self._wants_overlaps = wants_overlaps and not is_tree
        self._fallback = Fallback() if settings.fallback and drafter is not None else None
        self._proposer = Proposer(
            drafter,
            self.plan,
            min_confidence=settings.min_confidence,
            fallback=self._fallback,
        )
        self._curves: dict[int, TimeCurve] = {}
        self._watchers = Watchers(drafter, listener)
        self._watchers.request.check(target.spec.num_layers)
        self._eos = frozenset() if settings.ignore_eos else frozenset(target.spec.eos_ids)
        if drafter is not None:
            drafter.eval()
        self._graphs: StaticRunner | None = None
        if wants_graphs(target, drafter, settings, self.plan, has_listener=listener is not None):
            self._graphs = StaticRunner(
                target,
                drafter,
                settings,
                self.plan,
                clock=self.clock,
                eos_ids=self._eos,
                captures=True,
            )

    @property
    def num_draft_tokens(self) -> int:
        """K: draft tokens of a chain, or levels of a tree."""
        return self.plan.depth

    @property
    def uses_graphs(self) -> bool:
        """True when rounds may run as CUDA graphs, whose parts no clock can tell apart."""
        return self._graphs is not None

    @property
    def is_lossy(self) -> bool:
        """True when answers do not have the target's law."""
        return self._judge.is_lossy

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling | Sequence[Sampling] | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        stop: Sequence[str] | None = None,
        batch_size: int | None = None,
        on_tokens: OnTokens | None = None,
        on_finish: Callable[[Generation], None] | None = None,
        row_keys: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Answer prompts, `batch_size` at a time, in the order given.

        Args:
            prompts: token ids, at least one each.
            sampling: how the target is sampled, for all or one a prompt; None takes the settings'.
            max_new_tokens: limit of each answer, for all or one a prompt; None takes the settings'.
            stop: strings that end an answer; None takes the settings'.
            batch_size: None takes the settings'.
            on_tokens: called with (prompt index, tokens that came out, how many of them were
                accepted draft tokens).
            on_finish: called with each finished answer, in order of finishing.
            row_keys: key of each prompt's randomness; None takes its index. Equal keys and seed
                give equal draws, whatever the batch-mates.

        Raises:
            ConfigError: an empty prompt, one that leaves no room for an answer or has ids that the
                target does not know, limits below 1, or sampling that the settings' rule is not
                for.
        """
        strings = self.settings.stop if stop is None else stop
        stops = None
        if strings:
            silent = frozenset(self.target.spec.eos_ids)
            stops = StopStrings(self.target.tokenizer, strings, silent)
        rows = make_rows(
            self.target,
            prompts,
            sampling=self.settings.sampling if sampling is None else sampling,
            max_new_tokens=(
                self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
            ),
            stops=stops,
            row_keys=row_keys,
        )
        if not rows:
            return []
        num_slots = self.settings.batch_size if batch_size is None else batch_size
        if num_slots < 1:
            raise ConfigError(f"batch_size={num_slots}; expected 1 or more")
        self._judge.prepare([row.sampling for row in rows])
        done: dict[int, Generation] = {}
        for generation in self._choose_run(rows, num_slots, on_tokens):
            done[generation.prompt_index] = generation
            if on_finish is not None:
                on_finish(generation)
        return [done[index] for index in range(len(prompts))]

    def _choose_run(
        self, rows: list[Row], batch_size: int, on_tokens: OnTokens | None
    ) -> Iterator[Generation]:
        """Run rows through graphs where these rows can, else round by round."""
        if self._graphs is None:
            return self._run(rows, batch_size, on_tokens)
        refusal = refuse_rows(rows)
        if self._wants_overlaps and self._judge.rule.reads == "probs":
            refusal = "overlaps of p and q are asked for, which graphs do not keep"
        if refusal is None:
            return self._graphs.run(rows, batch_size, on_tokens, self._judge.rule)
        if self.settings.graphs == "on":
            raise ConfigError(f"decode.graphs=on cannot take effect: {refusal}; pass auto")
        return self._run(rows, batch_size, on_tokens)

    def _run(
        self, rows: list[Row], batch_size: int, on_tokens: OnTokens | None
    ) -> Iterator[Generation]:
        waiting = deque(rows)
        with torch.inference_mode():
            batch = self._open(rows, slots=min(batch_size, len(rows)))
        while waiting or batch.live:
            entering: list[Row] = []
            while waiting and batch.free:
                row = waiting.popleft()
                row.slot, row.entered_s = batch.free.pop(), self.clock.read()
                entering.append(row)
            # inference mode is entered anew each round: a generator must not leak it to its caller
            with torch.inference_mode():
                if entering:
                    self._watchers.catch_up(batch.state)
                    tokens = self.settings.prefill_tokens
                    prefill(self.target, self._watchers, batch, entering, prefill_tokens=tokens)
                finished = self._round(batch, on_tokens)
            yield from finished

    def _open(self, rows: list[Row], *, slots: int) -> Batch:
        """Make room for a run, and measure what passes cost where drafts are sized by it."""
        self._watchers.forget()
        context = None
        if any(row.sampling.reads_context for row in rows):
            context = ContextTracker(slots, sorted(self._eos), self.target.device)
        longest = max(len(row.prompt_ids) + row.limit for row in rows)
        batch = Batch(
            self.target,
            self.drafter,
            slots=slots,
            # the last round may write drafts past the longest answer
            capacity=longest + self.plan.num_nodes + 1,
            num_nodes=self.plan.num_nodes,
            seed=self.settings.seed,
            context=context,
        )
        if self.plan.is_budgeted:
            if slots not in self._curves:
                self._curves[slots] = measure_time_curve(
                    self.target,
                    batch.kv,
                    rows=slots,
                    base=longest // 2,
                    widths=doubling_widths(self.plan.num_nodes + 1),
                    clock=self.clock,
                )
            self._proposer.curve = self._curves[slots]
        return batch

    # ------------------------------------------------------------------ one round

    def _round(self, batch: Batch, on_tokens: OnTokens | None) -> list[Generation]:
        """Draft, verify and commit once for every live row."""
        began = self.clock.read()
        tree = None
        is_resting = self._proposer.is_resting
        # a drafter that was asked has cost its time, whether or not it gave anything
        has_drafted = not is_resting and any(row.may_draft for row in batch.live)
        if not is_resting:
            self._watchers.catch_up(batch.state)
            tree = self._proposer.propose(batch, wants_points=self._judge.wants_points)
        drafted = self.clock.read()
        step = self._look_at(batch, tree)
        out = self.target.run(batch.kv, step, request=self._watchers.request)
        assert out.logits is not None
        verdict, probs = self._judge.judge(batch, tree, out.logits, step.depths)
        outcome = fetch_outcome(tree, verdict)  # the one wait for the device in a round
        verified = self.clock.read()

        firsts = [row.is_fresh for row in batch.live]
        emitted = self._emit(batch, outcome)
        if outcome.has_jumps:
            batch.kv.compact(batch.slots, batch.base, verdict.path[:, : outcome.deepest])
        show_path(self._watchers, batch, step.ids, verdict, outcome, out.features, is_resting)
        batch.advance(verdict)
        committed = self.clock.read()

        overlaps = list_overlaps(
            tree, probs if self._wants_overlaps else None, rows=len(batch.live)
        )
        times = (drafted - began, verified - drafted, committed - verified)
        self._note(batch, outcome, firsts, committed - began, has_drafted=has_drafted)
        finished: list[Generation] = []
        for i, row in enumerate(batch.live):
            count, num_drafted = outcome.counts[i], outcome.drafts[i]
            if firsts[i]:
                row.first_token_at = committed
            else:
                seen = tuple(overlaps[i][: min(count + 1, num_drafted)])
                row.steps.append(
                    StepRecord(num_drafted, count, len(emitted[i]), seen, *times, len(batch.live))
                )
            if on_tokens is not None:
                on_tokens(row.prompt_index, emitted[i], min(count, len(emitted[i])))
            if row.finish is not None:
                finished.append(row.as_generation(committed, is_lossy=self.is_lossy))
        if finished:
            self._retire(batch)
        return finished

    def _look_at(self, batch: Batch, tree: DraftTree | None) -> Step:
        """Say what the target is to run: the anchors, and behind them the draft nodes."""
        ids, depths, ancestors = batch.anchors, None, None
        if tree is not None:
            ids = torch.cat([ids, tree.tokens], dim=1)
            if self.plan.shape is not None:
                depths, ancestors = place_nodes(tree.parents)
        live = max(row.base for row in batch.live) + ids.shape[1]
        step = Step(batch.slots, ids, batch.base, live, depths, ancestors)
        return step.within(self.target.spec.max_positions)

    def _emit(self, batch: Batch, outcome: Outcome) -> list[list[int]]:
        """Let accepted runs and next tokens into the answers; give what was kept of each."""
        emitted = []
        for row, count, run in zip(batch.live, outcome.counts, outcome.runs, strict=True):
            emitted.append(row.emit(run, self._eos))
            row.base += count + 1
            row.anchor = run[-1]
            row.rounds += 1
            if batch.context is not None:
                batch.context.extend(row.slot, emitted[-1])
        return emitted

    def _note(
        self,
        batch: Batch,
        outcome: Outcome,
        firsts: list[bool],
        seconds: float,
        *,
        has_drafted: bool,
    ) -> None:
        """Tell the fallback what the round cost and gave."""
        if self._fallback is None:
            return
        live = len(batch.live)
        if not has_drafted:
            self._fallback.note_plain(seconds=seconds, live=live)
            return
        gave = [
            count + 1
            for count, is_first in zip(outcome.counts, firsts, strict=True)
            if not is_first
        ]
        self._fallback.note_drafted(seconds=seconds, live=live, tokens=sum(gave) / len(gave))

    def _retire(self, batch: Batch) -> None:
        self._watchers.catch_up(batch.state)
        leaving = batch.leave()
        if self.drafter is not None:
            crossing.close(self.drafter, batch.state, leaving)
