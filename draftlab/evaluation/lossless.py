"""The losslessness audit: would the target alone have produced these very tokens?

In: the answers that were timed. Out: `AuditVerdict`. Every output position is scored again by the
same target, teacher-forced and one token wide, as plain decoding would; nothing is taken from the
pass that verified it. Read first: audit, then score_narrow.

A token below the largest logit by more than the tolerance is a defect. The tolerance is measured:
how far wide and narrow passes of this target differ on the same prefixes. Where they are bitwise
equal, it is zero.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from draftlab.decoding.records import Generation
from draftlab.evaluation.forced import Answer, as_ints, open_rows, prefill_prompts, run_at
from draftlab.evaluation.results import AuditVerdict, Defect
from draftlab.sampling import GREEDY, ContextTracker, Sampling, adjust, process
from draftlab.shapes import Tensor
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


@dataclass(frozen=True, slots=True)
class PassGap:
    """How far passes of verification's width differ from narrow ones, on the same prefixes.

    Attributes:
        width: tokens of the wide passes.
        num_positions: output places measured.
        tolerance: logit units; see `measure_gap`.
        mean_tv: mean total variation between the two laws at a place.
        worst_tv: the largest.
    """

    width: int
    num_positions: int
    tolerance: float
    mean_tv: float
    worst_tv: float


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
        draft_width: draft nodes a step (K of a chain), to calibrate the tolerance at the width of
            verification.
        prefill_tokens: as in decoding.
        ends_at_eos: False when end tokens were ignored on purpose.
        cache: scores by (prompt, output); arms with equal answers share them.
        progress: called with (positions done, positions in all).
    """
    known = {} if cache is None else cache
    answers = [(tuple(g.prompt_ids), tuple(g.output_ids)) for g in generations]
    distinct = dict.fromkeys(answers)
    fresh = sorted((a for a in distinct if a not in known), key=lambda answer: len(answer[1]))
    total = sum(len(output) for _, output in distinct)
    done = total - sum(len(output) for _, output in fresh)
    if progress is not None and not fresh:
        progress(done, total)  # all scored with an earlier arm's: still this one's audit
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
        _rescore_doubtful(target, answers, known, sampling, prefill_tokens)
        if any(_is_doubtful(known[answer]) for answer in answers):
            # also where the load probe found passes equal: it did not try every width
            tolerance = measure_tolerance(
                target,
                list(dict.fromkeys(answers))[:_CALIBRATION_ANSWERS],
                width=draft_width + 1,
                prefill_tokens=prefill_tokens,
            )
    requires_identity = requires_identity and tolerance == 0
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
    tracker = None
    if sampling.reads_context:
        tracker = ContextTracker(len(answers), sorted(target.spec.eos_ids), target.device)
        for row, (prompt, _) in enumerate(answers):
            tracker.enter(row, prompt)
    with torch.inference_mode():
        kv, answers = open_rows(target, answers, spare=prefill_tokens)
        prefill_prompts(target, kv, answers, prefill_tokens)
        for place in range(max(len(output) for _, output in answers)):
            rows = [r for r, (_, output) in enumerate(answers) if place < len(output)]
            logits = run_at(target, kv, answers, rows, place, width=1)[:, 0]
            context = None if tracker is None else tracker.at(rows)
            tokens = [answers[r][1][place] for r in rows]
            emitted = as_ints(target, tokens)
            adjusted = adjust(logits, sampling, context)
            best = adjusted.max(-1)
            margins = best.values - adjusted.gather(1, emitted.unsqueeze(1)).squeeze(1)
            probs = process(logits, sampling, context)
            mass = probs.gather(1, emitted.unsqueeze(1)).squeeze(1) > 0
            for row, token, expected, margin, has_mass in zip(
                rows, tokens, best.indices.tolist(), margins.tolist(), mass.tolist(), strict=True
            ):
                scores[row].append(NarrowScore(expected, margin, has_mass))
                if tracker is not None:
                    tracker.extend(row, [token])
    return scores


def measure_tolerance(
    target: Target, answers: Sequence[Answer], *, width: int, prefill_tokens: int
) -> float:
    """Measure how far a wide pass may move logits, as `measure_gap` does."""
    return measure_gap(target, answers, width=width, prefill_tokens=prefill_tokens).tolerance


def measure_gap(
    target: Target,
    answers: Sequence[Answer],
    *,
    width: int,
    prefill_tokens: int,
    sampling: Sampling = GREEDY,
) -> PassGap:
    """Measure how far a wide pass moves logits: 2 x the 99.9th percentile of |wide - narrow|.

    Taken over the tokens nearest the maximum at each position, on the answers' own prefixes, one
    answer at a time; laws are compared over the whole vocabulary.

    Args:
        target: the target.
        answers: (prompt, output) pairs.
        width: tokens of the wide pass: draft nodes + 1.
        prefill_tokens: prompt tokens a pass takes at most.
        sampling: makes laws of logits; what reads the context is left out.
    """
    law = sampling.context_free
    differences: list[Tensor] = []
    distances: list[Tensor] = []
    with torch.inference_mode():
        for prompt, output in answers:
            answer = [(prompt, output[:_CALIBRATION_TOKENS])]
            length = len(answer[0][1])
            kv, answer = open_rows(target, answer, spare=max(width, prefill_tokens))
            prefill_prompts(target, kv, answer, prefill_tokens)
            narrow = torch.cat(
                [run_at(target, kv, answer, [0], t, width=1)[0] for t in range(length)]
            )
            wide = torch.cat(
                [
                    run_at(target, kv, answer, [0], t, width=min(width, length - t))[0]
                    for t in range(0, length, width)
                ]
            )
            rivals = narrow.topk(min(_RIVALS, narrow.shape[1]), dim=1).indices
            differences.append((wide - narrow).gather(1, rivals).abs().flatten())
            moved = (process(wide, law) - process(narrow, law)).abs()
            distances.append(moved.sum(1).double() / 2)
    every = torch.cat(differences).sort().values
    typical = float(every[min(len(every) - 1, math.ceil(0.999 * len(every)))])
    tv = torch.cat(distances)
    return PassGap(
        width=width,
        num_positions=len(tv),
        # where wide passes differ only here and there, the percentile is 0 and a flip possible
        tolerance=_SAFETY * (typical or float(every[-1])),
        mean_tv=float(tv.mean()),
        worst_tv=float(tv.max()),
    )


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
    sampling: Sampling,
    prefill_tokens: int,
) -> None:
    """Score again, alone: plain decoding at batch 1 is the yardstick, not one with batch-mates."""
    for answer in dict.fromkeys(answers):
        if _is_doubtful(known[answer]):
            known[answer] = score_narrow(
                target, [answer], sampling=sampling, prefill_tokens=prefill_tokens
            )[0]


def _first_difference(one: Generation, two: Generation) -> int | None:
    a, b = one.output_ids, two.output_ids
    if a == b:
        return None
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)
