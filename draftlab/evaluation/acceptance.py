"""Acceptance: how many draft tokens the target kept, by every definition in use.

In: generations with their step records. Out: `AcceptanceStats`. Read first: compute_acceptance.
"""

from collections.abc import Callable, Sequence

from draftlab.decoding.records import Generation, StepRecord
from draftlab.evaluation.intervals import NUM_DRAWS, mean_estimate, ratio_estimate
from draftlab.evaluation.results import AcceptanceStats, Estimate

REPEAT_LENGTH = 16


def compute_acceptance(
    generations: Sequence[Generation],
    *,
    seed: int,
    depth: int | None = None,
    num_draws: int = NUM_DRAWS,
) -> AcceptanceStats:
    """Compute acceptance over prompts, each with a cluster-bootstrap interval.

    Generations without a verify step (one-token answers) say nothing and are left out.

    Args:
        generations: answers of one drafter.
        seed: of the bootstrap.
        depth: K, or levels of the tree, for records count nodes and a tree has more of them; None
            takes the longest draft for a chain.
        num_draws: bootstrap samples behind each interval.
    """
    clusters = [g for g in generations if g.steps]
    steps = [step for g in clusters for step in g.steps]
    longest = max((step.num_drafted for step in steps), default=0)
    depth = longest if depth is None else min(depth, longest)

    def ratio(
        over: Callable[[StepRecord], float], under: Callable[[StepRecord], float]
    ) -> Estimate:
        return ratio_estimate(
            [sum(map(over, g.steps)) for g in clusters],
            [sum(map(under, g.steps)) for g in clusters],
            seed=seed,
            num_draws=num_draws,
        )

    survival = tuple(ratio(_accepted_at(k), _one) for k in range(1, depth + 1))
    tau_uncut = ratio(lambda s: 1 + s.num_accepted, _one)
    _check_identity(tau_uncut, survival)
    fresh = [_steps_without_repeats(g) for g in clusters]
    return AcceptanceStats(
        num_prompts=len(clusters),
        num_steps=len(steps),
        num_drafted=sum(s.num_drafted for s in steps),
        num_accepted=sum(s.num_accepted for s in steps),
        num_emitted=sum(s.num_emitted for s in steps),
        tau=ratio(lambda s: s.num_emitted, _one),
        tau_macro=mean_estimate(
            [sum(s.num_emitted for s in g.steps) / len(g.steps) for g in clusters],
            seed=seed,
            num_draws=num_draws,
        ),
        tau_uncut=tau_uncut,
        accepted_per_step=ratio(lambda s: s.num_accepted, _one),
        acceptance_rate=ratio(lambda s: s.num_accepted, lambda s: s.num_drafted),
        survival=survival,
        alpha=tuple(ratio(_accepted_at(k), _reached(k)) for k in range(1, depth + 1)),
        overlap=_overlaps(steps, ratio),
        emitted_histogram=_histogram(steps),
        share_with_draft=ratio(lambda s: s.num_drafted > 0, _one),
        repeated_share=ratio_estimate(
            [len(repeated_positions(g.output_ids)) for g in clusters],
            [len(g.output_ids) for g in clusters],
            seed=seed,
            num_draws=num_draws,
        ),
        tau_without_repeats=ratio_estimate(
            [sum(s.num_emitted for s in kept) for kept in fresh],
            [len(kept) for kept in fresh],
            seed=seed,
            num_draws=num_draws,
        ),
    )


def repeated_positions(ids: Sequence[int], length: int = REPEAT_LENGTH) -> set[int]:
    """Find the places inside a run of `length` tokens that the same answer had before.

    Small models fall into loops, and loops are easy to draft: this share belongs beside tau.
    """
    seen: set[tuple[int, ...]] = set()
    repeated: set[int] = set()
    for start in range(len(ids) - length + 1):
        gram = tuple(ids[start : start + length])
        if gram in seen:
            repeated.update(range(start, start + length))
        seen.add(gram)
    return repeated


def _steps_without_repeats(generation: Generation) -> list[StepRecord]:
    """Keep the verify steps that emitted no repeated token."""
    repeated = repeated_positions(generation.output_ids)
    place = len(generation.output_ids) - sum(s.num_emitted for s in generation.steps)
    kept = []
    for step in generation.steps:
        if not any(p in repeated for p in range(place, place + step.num_emitted)):
            kept.append(step)
        place += step.num_emitted
    return kept


def _one(step: StepRecord) -> int:
    return 1


def _accepted_at(k: int) -> Callable[[StepRecord], float]:
    return lambda step: step.num_accepted >= k


def _reached(k: int) -> Callable[[StepRecord], float]:
    return lambda step: step.num_accepted >= k - 1 and step.num_drafted >= k


def _overlaps(steps: Sequence[StepRecord], ratio: Callable[..., Estimate]) -> tuple[Estimate, ...]:
    depth = max((len(step.overlaps) for step in steps), default=0)
    return tuple(
        ratio(
            lambda s, k=k: s.overlaps[k] if len(s.overlaps) > k else 0.0,
            lambda s, k=k: len(s.overlaps) > k,
        )
        for k in range(depth)
    )


def _histogram(steps: Sequence[StepRecord]) -> tuple[int, ...]:
    counts = [0] * (max((step.num_emitted for step in steps), default=0) + 1)
    for step in steps:
        counts[step.num_emitted] += 1
    return tuple(counts)


def _check_identity(tau_uncut: Estimate, survival: Sequence[Estimate]) -> None:
    if tau_uncut.value is None:
        return
    total = 1 + sum(s.value or 0.0 for s in survival)
    assert abs(tau_uncut.value - total) < 1e-9, "uncut tau must be 1 + sum of survival"
