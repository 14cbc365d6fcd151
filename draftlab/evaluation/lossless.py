"""The losslessness audit: would the target alone have produced these very tokens?

In: the answers that were timed. Out: `AuditVerdict`. Every output position is scored again by the
same target, teacher-forced and one token wide, as plain decoding would; nothing is taken from the
pass that verified it. Read first: audit, then score_narrow.

A token below the largest logit by more than the tolerance is a defect. The tolerance is measured:
how far wide and narrow passes of this target differ on the same prefixes. Where the load probe
found them bitwise equal, it is zero.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from draftlab.decoding.records import Generation
from draftlab.evaluation.results import AuditVerdict, Defect
from draftlab.sampling import GREEDY, Sampling, process
from draftlab.shapes import Float, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.step import Step
from draftlab.targets.target import Target

_ROWS = 16
_CALIBRATION_ANSWERS = 8
_CALIBRATION_TOKENS = 64
# only tokens near the maximum can take its place
_RIVALS = 32
_SAFETY = 2.0
_MAX_DEFECTS_KEPT = 20
_LARGEST = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True)
class NarrowScore:
    """One output token under the target's one-token-wide pass.

    Attributes:
        expected_id: the target's own likeliest token.
        margin: largest logit minus the emitted token's.
        has_mass: True when sampling could emit the token at all (p > 0).
    """

    expected_id: int
    margin: float
    has_mass: bool


Answer = tuple[tuple[int, ...], tuple[int, ...]]


def audit(
    target: Target,
    generations: Sequence[Generation],
    *,
    baseline: Sequence[Generation] = (),
    sampling: Sampling = GREEDY,
    draft_width: int,
    prefill_tokens: int,
    ends_at_eos: bool = True,
    cache: dict[Answer, list[NarrowScore]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AuditVerdict:
    """Re-score outputs and count tokens that the target alone would not have produced.

    When sampled, each token must have p > 0; whether the outputs follow the target's law is a
    question for a two-sample test, which this is not.

    Args:
        target: the target that decoded.
        generations: the answers.
        baseline: the same prompts' answers without a drafter, to compare token by token.
        sampling: how the target was sampled.
        draft_width: K, to calibrate the tolerance at the width of verification.
        prefill_tokens: as in decoding.
        ends_at_eos: False when end tokens were ignored on purpose.
        cache: scores by (prompt, output); arms with equal answers share them.
        progress: called with (positions done, positions in all).
    """
    known = {} if cache is None else cache
    answers = [(tuple(g.prompt_ids), tuple(g.output_ids)) for g in generations]
    fresh = [answer for answer in dict.fromkeys(answers) if answer not in known]
    fresh.sort(key=lambda answer: len(answer[1]))
    total, done = sum(len(output) for _, output in fresh), 0
    for start in range(0, len(fresh), _ROWS):
        part = fresh[start : start + _ROWS]
        scores = score_narrow(target, part, sampling=sampling, prefill_tokens=prefill_tokens)
        known.update(zip(part, scores, strict=True))
        done += sum(len(output) for _, output in part)
        if progress is not None:
            progress(done, total)
    requires_identity = sampling.is_greedy and bool(target.report.get("rows_bitwise_equal"))
    tolerance = 0.0
    if sampling.is_greedy:
        _rescore_doubtful(target, answers, known, prefill_tokens)
        if not requires_identity and any(_is_doubtful(known[answer]) for answer in answers):
            tolerance = measure_tolerance(
                target,
                list(dict.fromkeys(answers))[:_CALIBRATION_ANSWERS],
                width=draft_width + 1,
                prefill_tokens=prefill_tokens,
            )
    eos = frozenset(target.spec.eos_ids) if ends_at_eos else frozenset()
    judged = _judge(generations, known, sampling, tolerance, eos)
    forks = [
        _first_difference(a, b)
        for a, b in (zip(generations, baseline, strict=True) if baseline else ())
    ]
    found = [fork for fork in forks if fork is not None]
    return AuditVerdict(
        is_greedy=sampling.is_greedy,
        num_prompts=len(answers),
        num_positions=sum(len(output) for _, output in answers),
        num_exact=judged.num_exact,
        num_ties=judged.num_ties,
        num_defects=len(judged.defects),
        tolerance=tolerance,
        requires_identity=requires_identity,
        worst_margin=judged.worst_margin,
        num_compared=len(forks),
        num_identical=forks.count(None),
        first_divergence=float(statistics.median(found)) if found else None,
        defects=tuple(judged.defects[:_MAX_DEFECTS_KEPT]),
    )


def score_narrow(
    target: Target, answers: Sequence[Answer], *, sampling: Sampling, prefill_tokens: int
) -> list[list[NarrowScore]]:
    """Score every output token by a pass over one token, its prefix teacher-forced.

    Args:
        target: the target.
        answers: (prompt, output) pairs, decoded side by side as rows of one token each.
        sampling: the law that p > 0 is asked of.
        prefill_tokens: prompt tokens a pass takes at most.
    """
    scores: list[list[NarrowScore]] = [[] for _ in answers]
    with torch.inference_mode():
        kv = _open(target, answers, spare=prefill_tokens)
        _prefill(target, kv, answers, prefill_tokens)
        for place in range(max(len(output) for _, output in answers)):
            rows = [r for r, (_, output) in enumerate(answers) if place < len(output)]
            logits = _run_at(target, kv, answers, rows, place, width=1)[:, 0]
            emitted = _ints(target, [answers[r][1][place] for r in rows])
            best = logits.max(-1)
            margins = best.values - logits.gather(1, emitted.unsqueeze(1)).squeeze(1)
            mass = process(logits, sampling).gather(1, emitted.unsqueeze(1)).squeeze(1) > 0
            for row, expected, margin, has_mass in zip(
                rows, best.indices.tolist(), margins.tolist(), mass.tolist(), strict=True
            ):
                scores[row].append(NarrowScore(expected, margin, has_mass))
    return scores


def measure_tolerance(
    target: Target, answers: Sequence[Answer], *, width: int, prefill_tokens: int
) -> float:
    """Measure how far a wide pass moves logits: 2 x the 99.9th percentile of |wide - narrow|.

    Taken over the tokens nearest the maximum at each position, on the answers' own prefixes, one
    answer at a time.

    Args:
        target: the target.
        answers: (prompt, output) pairs.
        width: tokens of the wide pass: K + 1.
        prefill_tokens: prompt tokens a pass takes at most.
    """
    differences: list[Tensor] = []
    with torch.inference_mode():
        for prompt, output in answers:
            answer = [(prompt, output[:_CALIBRATION_TOKENS])]
            length = len(answer[0][1])
            kv = _open(target, answer, spare=max(width, prefill_tokens))
            _prefill(target, kv, answer, prefill_tokens)
            narrow = torch.cat(
                [_run_at(target, kv, answer, [0], t, width=1)[0] for t in range(length)]
            )
            wide = torch.cat(
                [
                    _run_at(target, kv, answer, [0], t, width=min(width, length - t))[0]
                    for t in range(0, length, width)
                ]
            )
            rivals = narrow.topk(min(_RIVALS, narrow.shape[1]), dim=1).indices
            differences.append((wide - narrow).gather(1, rivals).abs().flatten())
    every = torch.cat(differences).sort().values
    typical = float(every[min(len(every) - 1, math.ceil(0.999 * len(every)))])
    # where wide passes differ only here and there, the percentile is 0 and a flip still possible
    return _SAFETY * (typical or float(every[-1]))


@dataclass(slots=True)
class _Judged:
    num_exact: int = 0
    num_ties: int = 0
    worst_margin: float = 0.0
    defects: list[Defect] = field(default_factory=list)


def _judge(
    generations: Sequence[Generation],
    known: dict[Answer, list[NarrowScore]],
    sampling: Sampling,
    tolerance: float,
    eos: frozenset[int],
) -> _Judged:
    judged = _Judged()
    for generation in generations:
        answer = (tuple(generation.prompt_ids), tuple(generation.output_ids))
        ended = False
        for place, (emitted, score) in enumerate(zip(answer[1], known[answer], strict=True)):
            # a margin that is no number (a pass gave NaN) is larger than any tolerance
            margin = score.margin if math.isfinite(score.margin) else _LARGEST
            is_exact = margin == 0 if sampling.is_greedy else score.has_mass
            is_tie = sampling.is_greedy and 0 < margin <= tolerance
            if sampling.is_greedy:
                judged.worst_margin = max(judged.worst_margin, margin)
            if ended or not (is_exact or is_tie):
                judged.defects.append(
                    Defect(generation.prompt_index, place, emitted, score.expected_id, margin)
                )
            else:
                judged.num_exact += is_exact
                judged.num_ties += is_tie
            ended = ended or emitted in eos
    return judged


def _is_doubtful(scores: Sequence[NarrowScore]) -> bool:
    return any(score.margin != 0 for score in scores)


def _rescore_doubtful(
    target: Target,
    answers: Sequence[Answer],
    known: dict[Answer, list[NarrowScore]],
    prefill_tokens: int,
) -> None:
    """Score again, alone: plain decoding at batch 1 is the yardstick, not one with batch-mates."""
    for answer in dict.fromkeys(answers):
        if _is_doubtful(known[answer]):
            known[answer] = score_narrow(
                target, [answer], sampling=GREEDY, prefill_tokens=prefill_tokens
            )[0]


def _first_difference(one: Generation, two: Generation) -> int | None:
    a, b = one.output_ids, two.output_ids
    if a == b:
        return None
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


def _open(target: Target, answers: Sequence[Answer], *, spare: int) -> KVBuffers:
    # right padding of a chunk is written past a row's end
    longest = max(len(prompt) + len(output) for prompt, output in answers)
    return target.open_kv(len(answers), longest + spare)


def _prefill(target: Target, kv: KVBuffers, answers: Sequence[Answer], prefill_tokens: int) -> None:
    """Run all prompt tokens but the last, like the decoder."""
    contexts = [prompt[:-1] for prompt, _ in answers]
    longest = max(len(context) for context in contexts)
    width = max(1, prefill_tokens // len(answers))
    for start in range(0, longest, width):
        rows = [r for r, context in enumerate(contexts) if len(context) > start]
        chunks = [contexts[r][start : start + width] for r in rows]
        widest = max(len(chunk) for chunk in chunks)
        ids = [list(chunk) + [0] * (widest - len(chunk)) for chunk in chunks]
        step = Step(
            rows=_ints(target, rows),
            ids=_ints(target, ids),
            base=_ints(target, [start] * len(rows)),
            live=start + widest,
        )
        target.run(kv, step, wants_logits=False)


def _run_at(
    target: Target,
    kv: KVBuffers,
    answers: Sequence[Answer],
    rows: Sequence[int],
    place: int,
    *,
    width: int,
) -> Float[Tensor, "R T V"]:
    """Give the logits that score output tokens place..place+width-1 of some rows."""
    texts = [answers[r][0] + answers[r][1] for r in rows]
    bases = [len(answers[r][0]) - 1 + place for r in rows]
    step = Step(
        rows=_ints(target, list(rows)),
        ids=_ints(
            target, [list(text[b : b + width]) for text, b in zip(texts, bases, strict=True)]
        ),
        base=_ints(target, bases),
        live=max(bases) + width,
    )
    logits = target.run(kv, step).logits
    assert logits is not None
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _ints(target: Target, values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=target.device)
