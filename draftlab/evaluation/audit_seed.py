"""One seed, with drafts and without: sampled-verify must give the same tokens.

In: pairs of answers drawn by the same numbers. Out: `SeedCheck`. Where they part, the place's
random number is set beside the target's narrow law: near the border between two tokens rounding
may decide, anywhere else it may not. Read first: check_same_seed.
"""

from collections.abc import Sequence

import torch

from draftlab.decoding.records import Generation
from draftlab.evaluation.audit_results import SeedCheck, SeedFork
from draftlab.evaluation.forced import Answer, open_rows, prefill_prompts, run_at
from draftlab.randomness import Purpose, uniforms
from draftlab.sampling import ContextTracker, Sampling, process
from draftlab.targets.target import Target

_ENDED = -1


def check_same_seed(
    target: Target,
    plain: Sequence[Generation],
    drafted: Sequence[Generation],
    *,
    sampling: Sampling,
    seed: int,
    tolerance: float,
    prefill_tokens: int,
) -> SeedCheck:
    """Compare answers token by token and look into every fork.

    Args:
        target: judges forks, by passes one token wide.
        plain: answers without drafts, each keyed by its prompt's index.
        drafted: the same prompts' answers with drafts.
        sampling: how both were sampled.
        seed: of both.
        tolerance: distance that rounding explains, in probability; 0 asks for identity.
        prefill_tokens: prompt tokens a pass takes at most.
    """
    forks = []
    for mine, theirs in zip(plain, drafted, strict=True):
        a, b = mine.output_ids, theirs.output_ids
        if a == b:
            continue
        shared = min(len(a), len(b))
        place = next((i for i in range(shared) if a[i] != b[i]), shared)
        distance = 1.0
        if place < shared:
            answer = (mine.prompt_ids, a)
            u = float(uniforms(seed, mine.prompt_index, place, Purpose.SAMPLE))
            law = _law_at(target, answer, place, sampling, prefill_tokens)
            distance = _distance(law, b[place], u)
        forks.append(
            SeedFork(
                prompt=mine.prompt_index,
                position=place,
                plain_id=a[place] if place < len(a) else _ENDED,
                drafted_id=b[place] if place < len(b) else _ENDED,
                distance=distance,
                is_tie=distance <= tolerance,
            )
        )
    return SeedCheck(
        num_answers=len(plain),
        num_identical=len(plain) - len(forks),
        num_tokens=sum(len(g.output_ids) for g in plain),
        tolerance=tolerance,
        forks=tuple(forks),
    )


def _law_at(
    target: Target, answer: Answer, place: int, sampling: Sampling, prefill_tokens: int
) -> list[float]:
    """Give the narrow law of one place, its tokens fed as plain decoding does."""
    with torch.inference_mode():
        kv, rows = open_rows(target, [answer], spare=prefill_tokens)
        prefill_prompts(target, kv, rows, prefill_tokens)
        logits = [run_at(target, kv, rows, [0], t, width=1)[:, 0] for t in range(place + 1)][-1]
        context = None
        if sampling.reads_context:
            tracker = ContextTracker(1, sorted(target.spec.eos_ids), target.device)
            tracker.enter(0, answer[0])
            tracker.extend(0, answer[1][:place])
            context = tracker.at([0])
        return process(logits, sampling, context)[0].double().tolist()


def _distance(law: Sequence[float], token: int, u: float) -> float:
    """How far u lies from the token's interval of the inverse CDF; at least a rounding error."""
    total = sum(law)
    low = sum(law[:token]) / total
    high = low + law[token] / total
    return max(low - u, u - high, 1e-16)
