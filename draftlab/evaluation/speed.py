"""Speed at batch 1: every arm decodes every prompt in one process, in an order that changes.

In: decoders by name and prompts. Out: `Timing`s, and from them `SpeedStats`. Read first: measure,
then compute_speed. Times inside an answer come from the decoder's own clock, which waits for the
device; the time around the whole call is taken here.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from draftlab.decoding.records import Generation
from draftlab.errors import ConfigError
from draftlab.evaluation.intervals import paired_estimate
from draftlab.evaluation.memory import PeakMemory
from draftlab.evaluation.results import Estimate, SpeedStats, StepTime
from draftlab.randomness import Purpose, uniforms


@runtime_checkable
class Answers(Protocol):
    """What is timed: a decoder."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        row_keys: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Answer prompts."""
        ...


@runtime_checkable
class Clock(Protocol):
    """Seconds, read after the device is done."""

    def read(self) -> float:
        """Give the time now."""
        ...


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer of one arm, timed.

    Attributes:
        arm: name of the decoder.
        prompt: index in the list of prompts.
        repeat: 0 for the first time.
        wall_s: seconds around the whole call, prefill included.
        generation: the answer and the decoder's own times.
        peak_bytes: most memory in use meanwhile; None where nobody counted.
    """

    arm: str
    prompt: int
    repeat: int
    wall_s: float
    generation: Generation
    peak_bytes: int | None = None

    @property
    def num_decoded(self) -> int:
        """Tokens that decoding gave: all but the first, which belongs to prefill."""
        return sum(step.num_emitted for step in self.generation.steps)


def measure(
    decoders: Mapping[str, Answers],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    warmup_prompts: int,
    repeats: int,
    seed: int,
    clock: Clock,
    memory: PeakMemory | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Timing]:
    """Time every arm on every prompt at batch 1, arms interleaved prompt by prompt.

    Machines drift, so the arms take turns: which goes first is drawn for each prompt and turned
    around in the next repeat.

    Args:
        decoders: arm name -> decoder.
        prompts: token ids.
        max_new_tokens: limit of each answer.
        warmup_prompts: prompts each arm decodes first, not timed.
        repeats: times each prompt is timed in each arm.
        seed: of the order.
        clock: for the time around a call.
        memory: counts the peak of every answer.
        progress: called with (answers done, answers in all).

    Raises:
        ConfigError: no prompt to time.
    """
    if not prompts:
        raise ConfigError(
            "no prompt to time; expected at least one: raise eval.speed_prompts_per_domain, or set "
            "it to 0 to leave speed out"
        )
    names = list(decoders)
    total = len(names) * (min(warmup_prompts, len(prompts)) + repeats * len(prompts))
    timings: list[Timing] = []
    done = 0

    def answer(name: str, index: int) -> Generation:
        nonlocal done
        generation = decoders[name].generate(
            [prompts[index]], max_new_tokens=max_new_tokens, batch_size=1, row_keys=[index]
        )[0]
        done += 1
        if progress is not None:
            progress(done, total)
        # of a call with one prompt it is 0, and the audit names prompts by it
        return replace(generation, prompt_index=index)

    for index in range(min(warmup_prompts, len(prompts))):
        for name in names:
            answer(name, index)
    for repeat in range(repeats):
        for index in range(len(prompts)):
            for name in _turn_order(names, index, repeat, seed):
                if memory is not None:
                    memory.restart()
                began = clock.read()
                generation = answer(name, index)
                spent = clock.read() - began
                peak = memory.read() if memory is not None else None
                timings.append(Timing(name, index, repeat, spent, generation, peak))
    return timings


def _turn_order(names: Sequence[str], prompt: int, repeat: int, seed: int) -> list[str]:
    """Draw an order for a prompt; odd repeats take it backwards."""
    keys = [float(uniforms(seed, prompt, place, Purpose.ORDER)) for place in range(len(names))]
    order = [name for _, name in sorted(zip(keys, names, strict=True))]
    return order[::-1] if repeat % 2 else order


def compute_speed(
    timings: Sequence[Timing], *, arm: str, baseline: str, prompts: Sequence[int] | None = None
) -> SpeedStats | None:
    """Compare an arm with the baseline on the prompts that both decoded beyond the first token.

    Args:
        timings: of both arms, every repeat.
        arm: name of the drafter's arm.
        baseline: name of the arm without a drafter.
        prompts: indices to use; all when None.

    Returns:
        None when no prompt has a decoded token in both arms.
    """
    pairs = [
        (mine, theirs)
        for mine, theirs in _pair(timings, arm, baseline)
        if prompts is None or mine[0].prompt in prompts
    ]
    if not pairs:
        return None
    mine = [timing for group, _ in pairs for timing in group]
    theirs = [timing for _, group in pairs for timing in group]
    token_s, baseline_token_s = _token_s(mine), _token_s(theirs)
    step, baseline_step = _step_time(mine), _step_time(theirs)
    tau = sum(t.num_decoded for t in mine) / sum(len(t.generation.steps) for t in mine)
    return SpeedStats(
        num_prompts=len(pairs),
        num_repeats=len(pairs[0][0]),
        baseline_tokens=sum(t.num_decoded for t in theirs),
        tokens=sum(t.num_decoded for t in mine),
        baseline_token_s=baseline_token_s,
        token_s=token_s,
        speedup=_speedup(pairs, lambda t: t.generation.decode_s, lambda t: t.num_decoded),
        end_to_end_speedup=_speedup(
            pairs, lambda t: t.wall_s, lambda t: len(t.generation.output_ids)
        ),
        speedup_by_repeat=tuple(
            _token_s([b[r] for _, b in pairs]) / _token_s([a[r] for a, _ in pairs])
            for r in range(len(pairs[0][0]))
        ),
        baseline_first_token_s=statistics.median(t.generation.first_token_s for t in theirs),
        first_token_s=statistics.median(t.generation.first_token_s for t in mine),
        baseline_step_s=baseline_step.total_s,
        step=step,
        tau=tau,
        predicted_speedup=tau * baseline_step.total_s / (step.draft_s + step.verify_s),
        num_identical=sum(
            all(
                x.generation.output_ids == y.generation.output_ids
                for x, y in zip(a, b, strict=True)
            )
            for a, b in pairs
        ),
    )


def _speedup(
    pairs: Sequence[tuple[list[Timing], list[Timing]]],
    seconds: Callable[[Timing], float],
    tokens: Callable[[Timing], float],
) -> Estimate:
    return paired_estimate(
        over=[[sum(map(seconds, b)) for _, b in pairs], [sum(map(tokens, a)) for a, _ in pairs]],
        under=[[sum(map(tokens, b)) for _, b in pairs], [sum(map(seconds, a)) for a, _ in pairs]],
    )


def _pair(
    timings: Sequence[Timing], arm: str, baseline: str
) -> list[tuple[list[Timing], list[Timing]]]:
    groups: dict[tuple[str, int], list[Timing]] = {}
    for timing in timings:
        if timing.arm in (arm, baseline):
            groups.setdefault((timing.arm, timing.prompt), []).append(timing)
    prompts = sorted({prompt for _, prompt in groups})
    pairs = [
        (groups[arm, p], groups[baseline, p])
        for p in prompts
        if (arm, p) in groups and (baseline, p) in groups
    ]
    return [(a, b) for a, b in pairs if all(t.num_decoded for t in (*a, *b))]


def _token_s(timings: Sequence[Timing]) -> float:
    return sum(t.generation.decode_s for t in timings) / sum(t.num_decoded for t in timings)


def _step_time(timings: Sequence[Timing]) -> StepTime:
    steps = [step for t in timings for step in t.generation.steps]
    draft, verify, commit = (
        sum(getattr(step, name) for step in steps) / len(steps)
        for name in ("draft_s", "verify_s", "commit_s")
    )
    whole = sum(t.generation.decode_s for t in timings) / len(steps)
    return StepTime(draft, verify, commit, max(0.0, whole - draft - verify - commit))
