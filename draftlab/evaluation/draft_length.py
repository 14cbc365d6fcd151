"""K for each drafter, chosen on validation prompts by expected tokens a second at batch 1.

In: a way to make decoders at any K, validation prompts, candidates. Out: `LengthChoice`.

A chain's first k draft tokens do not depend on how many more would follow, so acceptance is
measured once, at the largest K, and tau(K) = 1 + survival_1 + ... + survival_K. The cost of a step
does depend on K and is measured at each K, in turns, so that a slow moment of the machine falls on
all of them; the median forgets it.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from draftlab.decoding.records import Generation, StepRecord
from draftlab.evaluation.results import LengthChoice, LengthOption
from draftlab.evaluation.speed import Answers

_COST_PROMPTS = 5
_COST_TOKENS = 12

METHOD = (
    "tau at each K from survival at the largest K on validation prompts; seconds of a verify step "
    "measured at each K at batch 1, median of answers taken in turns; the K of most tokens a second"
)


def choose_draft_length(
    decoder_at: Callable[[int], Answers],
    prompts: Sequence[Sequence[int]],
    candidates: Sequence[int],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> LengthChoice:
    """Choose the K that promises most tokens a second.

    Args:
        decoder_at: gives a decoder that drafts K tokens.
        prompts: validation prompts, never those of the evaluation.
        candidates: K to choose from, ascending.
        max_new_tokens: limit of an answer when acceptance is measured.
        batch_size: of the acceptance run; costs are measured at batch 1.
        progress: called with (candidates' worth done, candidates in all).
    """
    largest = decoder_at(candidates[-1])
    answers = largest.generate(prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    steps = _steps(answers)
    # a drafter with fewer heads than the largest candidate never drafts more
    deepest = max((step.num_drafted for step in steps), default=0)
    usable = [k for k in candidates if k <= deepest] or [candidates[0]]
    decoders = {k: decoder_at(k) for k in usable}
    costs = _measure_steps(decoders, prompts[:_COST_PROMPTS], progress)
    options = []
    for k, step_s in zip(usable, costs, strict=True):
        tau = _tau_at(steps, k)
        options.append(LengthOption(k, tau, step_s, tau / step_s if step_s > 0 else 0.0))
    best = max(options, key=lambda option: option.tokens_per_s)  # of equals, the smallest K
    return LengthChoice(best.num_draft_tokens, tuple(options), len(prompts), METHOD)


def _tau_at(steps: Sequence[StepRecord], k: int) -> float:
    if not steps:
        return 1.0
    return 1 + sum(min(step.num_accepted, k) for step in steps) / len(steps)


def _measure_steps(
    decoders: Mapping[int, Answers],
    prompts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None] | None,
) -> list[float]:
    """Median seconds of a verify step of each decoder, after an answer each to warm up."""
    seconds: list[list[float]] = [[] for _ in decoders]
    done, total = 0, (1 + len(prompts)) * len(decoders)
    for number, prompt in enumerate([*prompts[:1], *prompts]):
        for (k, decoder), found in zip(decoders.items(), seconds, strict=True):
            # near its limit an answer has no room for K drafts, and fewer are cheaper
            limit = _COST_TOKENS + k
            (answer,) = decoder.generate([prompt], max_new_tokens=limit, batch_size=1)
            before = itertools.accumulate((s.num_emitted for s in answer.steps), initial=1)
            steps = [s for s, told in zip(answer.steps, before, strict=False) if limit - told > k]
            if number and steps:
                # not the answer's time: of so short a one, what lies between steps weighs too much
                found.append(statistics.fmean(s.draft_s + s.verify_s + s.commit_s for s in steps))
            done += 1
            if progress is not None:
                progress(done * len(decoders) // total, len(decoders))
    return [statistics.median(found) if found else 0.0 for found in seconds]


def _steps(answers: Sequence[Generation]) -> list[StepRecord]:
    return [step for answer in answers for step in answer.steps]
