"""One round on the device alone: draft, verify, accept, commit, and the drafter's catch-up.

The same arithmetic as `Decoder._round`, over all slots in order, with every fact of a row in a
tensor that is changed in place: nothing waits for the host, and no shape depends on what
was accepted. So the round can be captured as one CUDA graph (graphs.py), and is tested eagerly on
a CPU. Read `StaticRound.run`.

Rows that are done, and slots without a row, run along as dummies: their lengths stay, their tokens
go to a column that nobody reads, and the next pass overwrites their keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch

from draftlab.decoding.committing import take_path
from draftlab.decoding.geometry import place_nodes
from draftlab.decoding.plan import DraftPlan
from draftlab.decoding.slots import Sequence as Row
from draftlab.decoding.verify import Rule
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.randomness import Purpose, uniforms
from draftlab.sampling import Sampling, adjust, draw, greedy_ids, process
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.step import Step
from draftlab.targets.target import Target


@runtime_checkable
class StaticDrafting(Protocol):
    """A drafter's device-only methods, over all slots in order; no position reaches `live`."""

    def propose(
        self, state: Any, budget: DraftBudget, uniforms: Float[Tensor, "R N"], *, live: int
    ) -> DraftTree:
        """Propose a chain of exactly `num_draft_tokens` columns, or the tree asked for."""
        ...

    def observe(self, state: Any, seen: Observation, *, live: int) -> None:
        """Take in accepted positions; a length of 0 changes nothing."""
        ...

    def settle(self, state: Any) -> None:
        """Bring to the host what ordinary methods read there, before rows come or go."""
        ...


@runtime_checkable
class DraftsStatically(Protocol):
    """A drafter that has such methods."""

    def static_rounds(self) -> StaticDrafting:
        """Give them."""
        ...


@dataclass(frozen=True, slots=True)
class KnownDraft(DraftTree):
    """A draft whose shape is known without a look at its parents.

    Attributes:
        levels: of a tree; None is a chain.
    """

    levels: int | None = None

    @property
    def is_chain(self) -> bool:
        """True without levels."""
        return self.levels is None

    @property
    def most_levels(self) -> int:
        """Levels of the tree, or nodes of the chain."""
        return self.tokens.shape[1] if self.levels is None else self.levels


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a round reads and changes of each of R slots, in place.

    Attributes:
        base: committed length.
        anchors: newest token.
        keys: names of the rows' randomness.
        turns: verify steps so far.
        places: place in the answer of the next token.
        emitted: tokens in the answer.
        limits: tokens the answer may have.
        is_done: finished rows and empty slots.
    """

    base: Int[Tensor, " R"]
    anchors: Int[Tensor, " R"]
    keys: Int[Tensor, " R"]
    turns: Int[Tensor, " R"]
    places: Int[Tensor, " R"]
    emitted: Int[Tensor, " R"]
    limits: Int[Tensor, " R"]
    is_done: Bool[Tensor, " R"]


@dataclass(frozen=True, slots=True)
class Told:
    """What the host learns of the last rounds, one entry a slot and round.

    Attributes:
        accepted: draft tokens accepted, before cuts.
        drafted: draft tokens verified.
        kept: tokens that entered the answer.
        tokens: those tokens, of all rounds together.
    """

    accepted: list[list[int]]
    drafted: list[list[int]]
    kept: list[list[int]]
    tokens: list[list[int]]


class StaticRound:
    """Buffers of some slots, and the round over them."""

    def __init__(
        self,
        target: Target,
        drafting: StaticDrafting | None,
        *,
        kv: KVBuffers,
        state: Any,
        needs: FeatureRequest,
        plan: DraftPlan,
        rule: Rule,
        sampling: Sampling,
        seed: int,
        eos_ids: Sequence[int],
        most_rounds: int,
    ) -> None:
        """Allocate what rounds change.

        Args:
            target: whose law is kept.
            drafting: None decodes plainly.
            kv: the target's memory of all slots.
            state: the drafter's.
            needs: hidden states that the drafter reads.
            plan: what is drafted in a round: nothing, a chain, or a tree.
            rule: for greedy or drawn tokens, as `sampling` is.
            sampling: of all rows; without penalties.
            seed: root of the draws.
            eos_ids: tokens that end an answer.
            most_rounds: rounds between two looks of the host, at most.
        """
        device = target.device
        self._target, self._drafting, self._kv, self._state = target, drafting, kv, state
        self._needs, self._rule, self._seed = needs, rule, seed
        self._depth, self._num_nodes, self._shape = plan.depth, plan.num_nodes, plan.shape
        self._sampling = sampling
        self._draft_sampling = replace(sampling.context_free, logit_bias=())
        slots = kv.slots
        self._rows = torch.arange(slots, device=device)
        self._columns = torch.arange(plan.num_nodes + 1, device=device)
        self._run_columns = self._columns[: plan.depth + 1]
        self._eos = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
        integers = [torch.zeros_like(self._rows) for _ in range(len(fields(RowFacts)) - 1)]
        self.facts = RowFacts(*integers, is_done=torch.ones_like(self._rows, dtype=torch.bool))
        # new tokens of the rounds since the host looked; the last column is read by nobody
        self._out = self._rows.new_zeros(slots, most_rounds * (plan.depth + 1) + 1)
        self._num_out = torch.zeros_like(self._rows)
        self._log = self._rows.new_zeros(most_rounds, 3, slots)
        self._tick = self._rows.new_zeros(1)

    def load(self, rows: Sequence[Row]) -> None:
        """Take over what the host knows of the live rows; all other slots are empty."""
        table = [[0, 0, 0, 0, 0, 0, 0, 1] for _ in range(self._kv.slots)]
        for row in rows:
            emitted = len(row.output_ids)
            facts = (row.base, row.anchor, row.key, row.rounds, emitted, emitted, row.limit, 0)
            table[row.slot] = [*facts]
        columns = torch.tensor(table, dtype=torch.int64).T.to(self._rows.device)
        for field, column in zip(fields(RowFacts), columns, strict=True):
            getattr(self.facts, field.name).copy_(column)

    def restart_log(self) -> None:
        """Begin a stretch of rounds that the host will look at together."""
        self._tick.zero_()
        self._num_out.zero_()

    def read_log(self, rounds: int) -> Told:
        """Wait for the device, and tell what these rounds gave: the only look of the host."""
        log: list[list[list[int]]] = self._log[:rounds].tolist()
        width = rounds * (self._depth + 1)
        out: list[list[int]] = self._out[:, :width].tolist()
        accepted, drafted, kept = ([turn[k] for turn in log] for k in range(3))
        counts = [sum(turn[slot] for turn in kept) for slot in range(len(out))]
        return Told(
            accepted, drafted, kept, [line[:n] for line, n in zip(out, counts, strict=True)]
        )

    def run(self, live: int) -> None:
        """Run one round of all slots.

        Args:
            live: no row is longer than this when the round ends, drafts included.
        """
        facts = self.facts
        anchors = facts.anchors.unsqueeze(1)
        draft = self._propose(live)
        ids = anchors if draft is None else torch.cat([anchors, draft.tokens], dim=1)
        depths, ancestors = None, None
        if draft is not None and not draft.is_chain:
            depths, ancestors = place_nodes(draft.parents)
        step = Step(self._rows, ids, facts.base, live, depths, ancestors, is_prefix=True)
        step = step.within(self._target.spec.max_positions)
        out = self._target.run(self._kv, step, request=self._needs)
        assert out.logits is not None
        verdict = self._judge(draft, out.logits, step.depths)
        features = out.features
        if draft is not None and not draft.is_chain:
            path = verdict.path[:, : self._depth]
            self._kv.compact(self._rows, facts.base, path)
            ids, features = take_path(ids, features, path)
        self._commit(draft, verdict, ids, live, features)

    def _propose(self, live: int) -> KnownDraft | None:
        if self._drafting is None:
            return None
        facts = self.facts
        budget = DraftBudget(
            self._rows,
            self._depth,
            self._draft_sampling,
            points=self._rule.points,
            tree=self._shape,
        )
        numbers = self._uniforms(Purpose.DRAFT, self._num_nodes)
        tree = self._drafting.propose(self._state, budget, numbers, live=live)
        # as in the ordinary round: no drafts before the first token, none that cannot stay; of a
        # tree all nodes or none
        room = (facts.limits - facts.emitted - 1).clamp_min(0) * (facts.emitted > 0)
        room = room * ~facts.is_done
        is_tree = self._shape is not None
        return KnownDraft(
            tokens=tree.tokens,
            parents=tree.parents,
            num_nodes=(
                tree.num_nodes * (room > 0) if is_tree else torch.minimum(tree.num_nodes, room)
            ),
            law_probs=tree.law_probs,
            law_ids=tree.law_ids,
            levels=self._depth if is_tree else None,
        )

    def _judge(
        self,
        draft: KnownDraft | None,
        logits: Float[Tensor, "R T V"],
        depths: Int[Tensor, "R T"] | None,
    ) -> Verdict:
        rule, facts = self._rule, self.facts
        if self._sampling.is_greedy:
            return self._after_ids(draft, greedy_ids(adjust(logits, self._sampling)))
        probs = process(logits, self._sampling)
        if rule.reads == "ids":
            places = facts.places.unsqueeze(1) + (self._columns if depths is None else depths)
            numbers = uniforms(self._seed, facts.keys.unsqueeze(1), places, Purpose.SAMPLE)
            return self._after_ids(draft, draw(probs, numbers))
        assert draft is not None, "plain rounds read ids"
        return rule.verify(
            draft,
            probs,
            # a dynamic tree may have grown fewer nodes than were asked for
            accept_uniforms=self._uniforms(Purpose.ACCEPT, draft.tokens.shape[1]),
            next_uniforms=self._uniforms(Purpose.RESAMPLE, 1).squeeze(1),
        )

    def _after_ids(self, draft: KnownDraft | None, ids: Int[Tensor, "R T"]) -> Verdict:
        if draft is not None:
            return self._rule.verify(draft, ids)
        return Verdict(ids[:, :0], torch.zeros_like(self._rows), ids[:, 0])

    def _uniforms(self, purpose: Purpose, count: int) -> Float[Tensor, "R N"]:
        if self._sampling.is_greedy:
            return torch.zeros(
                len(self._rows), count, dtype=torch.float64, device=self._rows.device
            )
        keys, turns = self.facts.keys.unsqueeze(1), self.facts.turns.unsqueeze(1)
        return uniforms(self._seed, keys, turns, self._columns[:count], purpose)

    def _commit(
        self,
        draft: KnownDraft | None,
        verdict: Verdict,
        ids: Int[Tensor, "R W"],
        live: int,
        features: TargetFeatures,
    ) -> None:
        """Move rows past their accepted runs, cut at end tokens and limits; show the drafter.

        Args:
            draft: what was verified.
            verdict: on it.
            ids: the anchor, and behind it the nodes of the accepted path, or more; W = K + 1.
            live: as in `run`.
            features: of those positions.
        """
        columns = self._run_columns
        facts, count = self.facts, verdict.num_accepted
        is_live = ~facts.is_done
        # the token after each position of the accepted run; what lies behind counts for nothing
        after = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
        after = after.scatter(1, count.unsqueeze(1), verdict.next_token.unsqueeze(1))
        if self._drafting is not None:
            lengths = (count + 1) * is_live
            seen = Observation(self._rows, ids, lengths, after, features.taps, features.final)
            self._drafting.observe(self._state, seen, live=live)
        is_run = (columns <= count.unsqueeze(1)) & is_live.unsqueeze(1)
        ends = is_run & (after.unsqueeze(2) == self._eos).any(2)
        is_cut = (ends.long().cumsum(1) - ends.long()) > 0
        room = (facts.limits - facts.emitted).unsqueeze(1)
        is_kept = is_run & ~is_cut & (columns < room)
        kept = is_kept.sum(1)
        places = (self._num_out.unsqueeze(1) + columns).masked_fill(
            ~is_kept, self._out.shape[1] - 1
        )
        self._out.scatter_(1, places, after)
        drafted = torch.zeros_like(count) if draft is None else draft.num_nodes
        self._log.index_copy_(0, self._tick, torch.stack([count * is_live, drafted, kept])[None])
        moved = (count + 1) * is_live
        facts.base.add_(moved)
        facts.places.add_(moved)
        facts.turns.add_(is_live)
        facts.emitted.add_(kept)
        facts.anchors.copy_(torch.where(is_live, verdict.next_token, facts.anchors))
        facts.is_done.logical_or_((ends & is_kept).any(1) | (facts.emitted >= facts.limits))
        self._num_out.add_(kept)
        self._tick.add_(1)
