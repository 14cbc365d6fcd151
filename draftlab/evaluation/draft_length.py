"""K for each drafter, chosen on validation prompts by expected tokens a second at batch 1.

In: a way to make decoders at any K, validation prompts, candidates. Out: `LengthChoice`.

A chain's first k draft tokens do not depend on how many more would follow, so acceptance is
measured once, at the largest K, and tau(K) = 1 + survival_1 + ... + survival_K. The cost of a step
does depend on K and is measured at each K.
"""

from collections.abc import Callable, Sequence

from draftlab.decoding.records import Generation, StepRecord
from draftlab.evaluation.results import LengthChoice, LengthOption
from draftlab.evaluation.speed import Answers

_COST_PROMPTS = 2
_COST_TOKENS = 24
_CLOSE = 0.98

METHOD = (
    "tau at each K from survival at the largest K on validation prompts; seconds of a verify step "
    "measured at each K at batch 1; the smallest K within 2 % of the most tokens a second"
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
        progress: called with (candidates done, candidates in all).
    """
    largest = decoder_at(candidates[-1])
    answers = largest.generate(prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
    steps = _steps(answers)
    # a drafter with fewer heads than the largest candidate never drafts more
    deepest = max((step.num_drafted for step in steps), default=0)
    usable = [k for k in candidates if k <= deepest] or [candidates[0]]
    options = []
    for number, k in enumerate(usable, start=1):
        step_s = _measure_step_s(decoder_at(k), prompts[:_COST_PROMPTS])
        tau = _tau_at(steps, k)
        options.append(LengthOption(k, tau, step_s, tau / step_s if step_s > 0 else 0.0))
        if progress is not None:
            progress(number, len(usable))
    most = max(option.tokens_per_s for option in options)
    # within the noise of the clock, shorter drafts waste less when the batch grows
    best = next(option for option in options if option.tokens_per_s >= _CLOSE * most)
    return LengthChoice(best.num_draft_tokens, tuple(options), len(prompts), METHOD)


def _tau_at(steps: Sequence[StepRecord], k: int) -> float:
    if not steps:
        return 1.0
    return 1 + sum(min(step.num_accepted, k) for step in steps) / len(steps)


def _measure_step_s(decoder: Answers, prompts: Sequence[Sequence[int]]) -> float:
    """Mean seconds of a verify step; the first prompt is also decoded once to warm up."""
    decoder.generate(prompts[:1], max_new_tokens=_COST_TOKENS // 3, batch_size=1)
    answers = [
        answer
        for prompt in prompts
        for answer in decoder.generate([prompt], max_new_tokens=_COST_TOKENS, batch_size=1)
    ]
    count = len(_steps(answers))
    return sum(answer.decode_s for answer in answers) / count if count else 0.0


def _steps(answers: Sequence[Generation]) -> list[StepRecord]:
    return [step for answer in answers for step in answer.steps]
