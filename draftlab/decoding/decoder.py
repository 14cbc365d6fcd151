"""The engine: prefill, then rounds of draft, verify, commit, until every answer is out.

In: a target, a drafter or None, prompts. Out: `Generation`s. Rows are ragged: each has its own
length, nothing is ever realigned, rejected drafts are overwritten by the next pass. Rows enter and
leave while others run. Without a drafter the same rounds are plain autoregressive decoding: the
baseline runs through the same kernels.

Read `Decoder._round` first.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from draftlab.decoding.records import Generation, StepRecord
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.slots import Sequence as Row
from draftlab.decoding.timing import DeviceClock
from draftlab.decoding.verify import compute_overlaps, verify_exact_match, verify_speculative
from draftlab.drafters.base import DraftBudget, Drafter, Observation
from draftlab.drafters.tree import DraftTree, Verdict, chain_of_points
from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.randomness import Purpose, uniforms
from draftlab.sampling import draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.step import Step, StepOutput
from draftlab.targets.target import Target


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
    ) -> None:
        """Check that this target, drafter and rule go together.

        Raises:
            UnsupportedTarget: this target's cache cannot be rolled back exactly.
            ConfigError: a rule that the sampling makes meaningless.
        """
        if target.speculation_refusal is not None:
            raise UnsupportedTarget(
                f"target {target.spec.name} cannot be decoded here: {target.speculation_refusal}; "
                "training and export still work for it"
            )
        self.target = target
        self.drafter = drafter
        self.settings = settings
        self.sampling = settings.sampling
        self.rule = _choose_rule(settings)
        self.num_draft_tokens = _choose_depth(settings, drafter)
        self.listener = listener
        self.clock = clock or DeviceClock(target.device)
        self._eos = frozenset() if settings.ignore_eos else frozenset(target.spec.eos_ids)
        self._drafter_needs = drafter.needs if drafter else FeatureRequest()
        self._listener_needs = listener.needs if listener else FeatureRequest()
        self._request = self._drafter_needs.union(self._listener_needs)
        self._request.check(target.spec.num_layers)
        if drafter is not None:
            drafter.eval()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        on_tokens: Callable[[int, list[int], int], None] | None = None,
        on_finish: Callable[[Generation], None] | None = None,
        row_keys: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Answer prompts, `batch_size` at a time, in the order given.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: limit of each answer; None takes the settings'.
            batch_size: None takes the settings'.
            on_tokens: called with (prompt index, tokens that came out, how many of them were
                accepted draft tokens).
            on_finish: called with each finished answer, in order of finishing.
            row_keys: key of each prompt's randomness; None takes its index. Equal keys and seed
                give equal draws, whatever the batch-mates.

        Raises:
            ConfigError: an empty prompt, or one that leaves no room for an answer.
        """
        limit = max_new_tokens or self.settings.max_new_tokens
        done: dict[int, Generation] = {}
        for generation in self._run(
            prompts, limit, batch_size or self.settings.batch_size, on_tokens, row_keys
        ):
            done[generation.prompt_index] = generation
            if on_finish is not None:
                on_finish(generation)
        return [done[index] for index in range(len(prompts))]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        limit: int,
        batch_size: int,
        on_tokens: Callable[[int, list[int], int], None] | None,
        row_keys: Sequence[int] | None,
    ) -> Iterator[Generation]:
        if not prompts:
            return
        limits = [self._limit(index, prompt, limit) for index, prompt in enumerate(prompts)]
        keys = list(row_keys) if row_keys is not None else list(range(len(prompts)))
        waiting = deque(range(len(prompts)))
        with torch.inference_mode():
            batch = _Batch(
                self,
                slots=min(batch_size, len(prompts)),
                longest=max(len(p) + m for p, m in zip(prompts, limits, strict=True)),
            )
        while waiting or batch.live:
            entering: list[Row] = []
            while waiting and batch.free:
                index = waiting.popleft()
                entering.append(
                    Row(
                        index,
                        list(prompts[index]),
                        limits[index],
                        slot=batch.free.pop(),
                        entered_s=self.clock.read(),
                    )
                )
            # inference mode is entered anew each round: a generator must not leak it to its caller
            with torch.inference_mode():
                if entering:
                    self._prefill(batch, entering)
                finished = self._round(batch, keys, on_tokens)
            yield from finished

    def _limit(self, index: int, prompt: Sequence[int], limit: int) -> int:
        if not prompt:
            raise ConfigError(f"prompt {index} is empty: expected at least one token")
        room = self.target.spec.max_positions - len(prompt)
        if room < 1:
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens, and the target takes "
                f"{self.target.spec.max_positions} with the answer; shorten it"
            )
        return min(limit, room)

    # ------------------------------------------------------------------ prefill

    def _prefill(self, batch: "_Batch", rows: list[Row]) -> None:
        """Run all prompt tokens but the last, in chunks; the last one becomes the anchor."""
        for group in _prefill_groups(rows, self.settings.prefill_tokens):
            longest = max(len(row.prompt_ids) for row in group) - 1
            width = max(1, self.settings.prefill_tokens // len(group))
            for start in range(0, longest, width):
                self._prefill_chunk(batch, group, start, min(start + width, longest))
        for row in rows:
            row.base = len(row.prompt_ids) - 1
            row.anchor = row.prompt_ids[-1]
            batch.live.append(row)
        batch.live.sort(key=lambda row: row.slot)

    def _prefill_chunk(self, batch: "_Batch", group: list[Row], start: int, stop: int) -> None:
        # a row whose prompt has ended stays at its own end and runs dummies that nothing can see
        chunks = [row.prompt_ids[start : min(stop, len(row.prompt_ids) - 1)] for row in group]
        width = max(len(chunk) for chunk in chunks)
        bases = [min(start, len(row.prompt_ids) - 1) for row in group]
        lengths = self._ints([len(chunk) for chunk in chunks])
        ids = self._ints([chunk + [0] * (width - len(chunk)) for chunk in chunks])
        rows = self._ints([row.slot for row in group])
        step = self._step(rows, ids, bases)
        out = self.target.run(batch.kv, step, request=self._request, wants_logits=False)
        if self.drafter is None and self.listener is None:
            return
        partners = [
            row.prompt_ids[base + 1 : base + 1 + len(chunk)]
            for row, base, chunk in zip(group, bases, chunks, strict=True)
        ]
        next_ids = self._ints([p + [0] * (width - len(p)) for p in partners])
        self._observe(batch, group, rows, ids, lengths, next_ids, out.features)

    # ------------------------------------------------------------------ one round

    def _round(
        self,
        batch: "_Batch",
        keys: list[int],
        on_tokens: Callable[[int, list[int], int], None] | None,
    ) -> list[Generation]:
        """Draft, verify and commit once for every live row."""
        live = batch.live
        began = self.clock.read()
        rows = self._ints([row.slot for row in live])
        anchors = self._ints([row.anchor for row in live]).unsqueeze(1)
        tree = self._draft(batch, rows, keys)
        drafted = self.clock.read()
        ids = torch.cat([anchors, tree.tokens], dim=1)
        step = self._step(rows, ids, [row.base for row in live])
        out = self.target.run(batch.kv, step, request=self._request, wants_logits=True)
        verdict, overlaps = self._verify(batch, tree, out, keys)
        counts: list[int] = verdict.num_accepted.tolist()
        tokens: list[list[int]] = tree.tokens.tolist()
        next_tokens: list[int] = verdict.next_token.tolist()
        drafts: list[int] = tree.num_nodes.tolist()
        verified = self.clock.read()

        emitted: list[list[int]] = []
        firsts = [row.is_fresh for row in live]
        for row, count, draft, token in zip(live, counts, tokens, next_tokens, strict=True):
            emitted.append(row.emit([*draft[:count], token], self._eos))
            row.base += count + 1
            row.anchor = token
            row.rounds += 1
        self._observe_path(batch, ids, verdict, out.features, counts)
        committed = self.clock.read()

        finished: list[Generation] = []
        for i, row in enumerate(live):
            if firsts[i]:
                row.first_token_at = committed
            else:
                row.steps.append(
                    StepRecord(
                        num_drafted=drafts[i],
                        num_accepted=counts[i],
                        num_emitted=len(emitted[i]),
                        overlaps=tuple(overlaps[i][: min(counts[i] + 1, drafts[i])]),
                        draft_s=drafted - began,
                        verify_s=verified - drafted,
                        commit_s=committed - verified,
                        batch_live=len(live),
                    )
                )
            if on_tokens is not None:
                on_tokens(row.prompt_index, emitted[i], min(counts[i], len(emitted[i])))
            if row.finish is not None:
                finished.append(row.as_generation(committed))
        if finished:
            self._retire(batch)
        return finished

    def _draft(self, batch: "_Batch", rows: Int[Tensor, " R"], keys: list[int]) -> DraftTree:
        live = batch.live
        allowed = [row.may_draft for row in live]
        depth = min(self.num_draft_tokens, max(allowed))
        if self.drafter is None or depth == 0:
            return chain_of_points(rows.new_zeros(len(live), 0))
        draws = self._uniforms(live, keys, depth, Purpose.DRAFT)
        tree = self.drafter.propose(batch.state, DraftBudget(rows, depth, self.sampling), draws)
        num_nodes = torch.minimum(tree.num_nodes, self._ints(allowed))
        # columns that count for no row are not worth the target's time
        used = int(num_nodes.max())
        return DraftTree(
            tokens=tree.tokens[:, :used],
            parents=tree.parents[:, :used],
            num_nodes=num_nodes,
            law_probs=tree.law_probs[:, :used],
            law_ids=None if tree.law_ids is None else tree.law_ids[:, :used],
        )

    def _verify(
        self, batch: "_Batch", tree: DraftTree, out: StepOutput, keys: list[int]
    ) -> tuple[Verdict, list[list[float]]]:
        logits = out.logits
        assert logits is not None
        live = batch.live
        nothing: list[list[float]] = [[] for _ in live]
        if self.sampling.is_greedy:
            return verify_exact_match(tree, greedy_ids(logits)), nothing
        probs = process(logits, self.sampling)
        overlaps = compute_overlaps(tree, probs).tolist() if tree.tokens.shape[1] else nothing
        if self.rule == "sampled_verify" or self.drafter is None:
            # keyed by the position in the answer: the same numbers whether or not drafts are used
            row = self._ints([keys[r.prompt_index] for r in live]).unsqueeze(1)
            place = self._ints([len(r.output_ids) for r in live]).unsqueeze(1)
            columns = torch.arange(probs.shape[1], device=probs.device)
            draws = uniforms(self.settings.seed, row, place + columns, Purpose.SAMPLE)
            return verify_exact_match(tree, draw(probs, draws)), overlaps
        verdict = verify_speculative(
            tree,
            probs,
            accept_uniforms=self._uniforms(live, keys, tree.tokens.shape[1], Purpose.ACCEPT),
            next_uniforms=self._uniforms(live, keys, 1, Purpose.RESAMPLE).squeeze(1),
        )
        return verdict, overlaps

    def _observe_path(
        self,
        batch: "_Batch",
        ids: Int[Tensor, "R M"],
        verdict: Verdict,
        features: TargetFeatures,
        counts: list[int],
    ) -> None:
        if self.drafter is None and self.listener is None:
            return
        # a chain's accepted path is its first columns, so no gather is needed
        width = max(counts) + 1
        partner = torch.cat([ids[:, 1:], ids[:, :1]], dim=1).scatter(
            1, verdict.num_accepted.unsqueeze(1), verdict.next_token.unsqueeze(1)
        )
        taps, final = features.taps, features.final
        cut = TargetFeatures(
            None if taps is None else taps[:, :width],
            None if final is None else final[:, :width],
        )
        rows = self._ints([row.slot for row in batch.live])
        self._observe(
            batch,
            batch.live,
            rows,
            ids[:, :width],
            verdict.num_accepted + 1,
            partner[:, :width],
            cut,
        )

    def _observe(
        self,
        batch: "_Batch",
        live: list[Row],
        rows: Int[Tensor, " R"],
        ids: Int[Tensor, "R W"],
        lengths: Int[Tensor, " R"],
        next_ids: Int[Tensor, "R W"],
        features: TargetFeatures,
    ) -> None:
        if self.drafter is not None:
            part = _select(features, self._request, self._drafter_needs)
            seen = Observation(rows, ids, lengths, next_ids, part.taps, part.final)
            self.drafter.observe(batch.state, seen)
        if self.listener is not None:
            part = _select(features, self._request, self._listener_needs)
            seen = Observation(rows, ids, lengths, next_ids, part.taps, part.final)
            self.listener.observe([row.prompt_index for row in live], seen)

    def _retire(self, batch: "_Batch") -> None:
        leaving = [row.slot for row in batch.live if row.finish is not None]
        batch.live = [row for row in batch.live if row.finish is None]
        batch.free.extend(leaving)
        batch.free.sort(reverse=True)
        if self.drafter is not None:
            self.drafter.close(batch.state, self._ints(leaving))

    # ------------------------------------------------------------------ small things

    def _step(self, rows: Int[Tensor, " R"], ids: Int[Tensor, "R T"], bases: list[int]) -> Step:
        base = self._ints(bases)
        last = max(bases) + ids.shape[1]
        depths = None
        if last > self.target.spec.max_positions:
            # only dummies and drafts that cannot be emitted lie there; keep them inside the table
            limit = (self.target.spec.max_positions - 1 - base).unsqueeze(1)
            depths = torch.minimum(torch.arange(ids.shape[1], device=ids.device), limit)
        return Step(rows=rows, ids=ids, base=base, live=last, depths=depths)

    def _uniforms(
        self, live: list[Row], keys: list[int], count: int, purpose: Purpose
    ) -> Float[Tensor, "R N"]:
        row = self._ints([keys[r.prompt_index] for r in live]).unsqueeze(1)
        turn = self._ints([r.rounds for r in live]).unsqueeze(1)
        columns = torch.arange(count, device=row.device)
        if self.sampling.is_greedy:
            return torch.zeros(len(live), count, dtype=torch.float64, device=row.device)
        return uniforms(self.settings.seed, row, turn, columns, purpose)

    def _ints(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)


class _Batch:
    """Buffers of a run, and who lives in which slot."""

    def __init__(self, decoder: Decoder, *, slots: int, longest: int) -> None:
        # the last round may write K drafts past the longest answer
        capacity = longest + decoder.num_draft_tokens + 1
        self.kv = decoder.target.open_kv(slots, capacity)
        drafter = decoder.drafter
        self.state = drafter.open(slots, capacity, self.kv) if drafter else None
        self.live: list[Row] = []
        self.free = list(reversed(range(slots)))


def _choose_rule(settings: DecodeSettings) -> str:
    greedy = settings.sampling.is_greedy
    if settings.rule == "auto":
        return "exact_match" if greedy else "speculative"
    if greedy != (settings.rule == "exact_match"):
        raise ConfigError(
            f"decode.rule={settings.rule} at decode.temperature={settings.temperature}: "
            "exact_match is for temperature 0, speculative and sampled_verify for more; "
            "decode.rule=auto chooses"
        )
    return settings.rule


def _choose_depth(settings: DecodeSettings, drafter: Drafter | None) -> int:
    if drafter is None:
        return 0
    depth = settings.num_draft_tokens or drafter.settings.num_draft_tokens
    if drafter.max_draft_tokens is not None and depth > drafter.max_draft_tokens:
        raise ConfigError(
            f"decode.num_draft_tokens={depth} is more than this {drafter.kind} drafter proposes; "
            f"expected at most {drafter.max_draft_tokens}"
        )
    return depth


def _prefill_groups(rows: list[Row], prefill_tokens: int) -> Iterator[list[Row]]:
    """Group rows of like length, so that padding stays small, within the token budget."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.prompt_ids)):
        if group and (len(group) + 1) * len(row.prompt_ids) > prefill_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


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
