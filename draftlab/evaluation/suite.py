"""A suite: every drafter on every domain, against plain decoding of the same target.

In: a target, drafters by name, prompts by domain. Out: `EvalResult`, and files if a folder is
given. Stages may be evaluated one after the other and put together with `results.merge`.

Read evaluate first. For each drafter: K on validation prompts, acceptance in batches, speed at
batch 1 interleaved with the baseline, the audit of the timed answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.plan import DraftPlan
from draftlab.decoding.records import Generation
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.timing import DeviceClock
from draftlab.drafters.base import Drafter, num_trainable
from draftlab.errors import ConfigError
from draftlab.evaluation.acceptance import compute_acceptance
from draftlab.evaluation.conditions import describe_conditions
from draftlab.evaluation.draft_length import choose_draft_length
from draftlab.evaluation.files import AnswerRecord, write_eval
from draftlab.evaluation.lossless import Answer, NarrowScore, audit
from draftlab.evaluation.results import (
    BASELINE,
    FORMAT,
    ArmResult,
    AuditVerdict,
    DomainResult,
    Estimate,
    EvalResult,
    LengthChoice,
    merge,
)
from draftlab.evaluation.settings import EvalSettings
from draftlab.evaluation.speed import Answers, Timing, compute_speed, measure
from draftlab.targets.target import Target

AGAIN = "baseline again"
LOSSY = "(LOSSY)"

Prompts = Mapping[str, Sequence[Sequence[int]]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a prompt comes from, and its ids."""

    domain: str
    index: int
    ids: tuple[int, ...]


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: Prompts,
    settings: EvalSettings,
    decode: DecodeSettings,
    *,
    validation: Prompts | None = None,
    earlier: EvalResult | None = None,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> EvalResult:
    """Run the suite and give everything it found.

    Args:
        target: the target.
        drafters: name -> drafter; the baseline is always added.
        prompts: domain -> token ids of its evaluation prompts.
        settings: what to measure.
        decode: sampling and limits; its K and batch size are set by the suite.
        validation: domain -> token ids of prompts that K is chosen on. Without them, or with
            `settings.draft_lengths` empty or `decode.num_draft_tokens` set, K is not chosen.
        earlier: the result of an earlier stage under the same conditions, to merge into.
        folder: where to write generations.jsonl, steps.jsonl and summary.json; None writes nothing.
        progress: called with (what is being done, done, in all).

    Raises:
        ConfigError: no drafter, no prompt, or an earlier stage under other conditions.
    """
    report = progress or (lambda what, done, total: None)
    _check(drafters, prompts)
    if decode.lossy:
        # in the name, so that no table, plot or file can leave it out
        drafters = {f"{name} {LOSSY}": drafter for name, drafter in drafters.items()}
    places = _take(prompts, settings.prompts_per_domain)
    taken = {
        domain: [p.ids for p in places if p.domain == domain]
        for domain in dict.fromkeys(p.domain for p in places)
    }
    choices = {
        name: _choose(target, name, drafter, validation, settings, decode, report)
        for name, drafter in drafters.items()
    }
    lengths = {
        name: choice.num_draft_tokens
        if choice
        else decode.num_draft_tokens or drafters[name].settings.num_draft_tokens
        for name, choice in choices.items()
    }
    records: list[AnswerRecord] = []
    answers: dict[str, list[Generation]] = {}
    plans: dict[str, DraftPlan] = {}
    for name, drafter in drafters.items():
        decoder = _decoder(target, drafter, decode, lengths[name], wants_overlaps=True)
        plans[name] = decoder.plan
        answers[name] = _decode_batched(decoder, places, settings, name, report)
        records += [
            AnswerRecord(name, "acceptance", place.domain, place.index, 0, answer)
            for place, answer in zip(places, answers[name], strict=True)
        ]

    timed = _take(taken, settings.speed_prompts_per_domain)
    timings: list[Timing] = []
    if timed:
        timings = _time_arms(target, drafters, lengths, timed, settings, decode, report)
        records += [
            AnswerRecord(
                t.arm,
                "speed",
                timed[t.prompt].domain,
                timed[t.prompt].index,
                t.repeat,
                t.generation,
            )
            for t in timings
        ]
    audits = _audit_arms(target, plans, timings, settings, decode, report)

    arms = tuple(
        _arm_result(
            name,
            drafter,
            plans[name],
            choices[name],
            places,
            answers[name],
            timed,
            timings,
            audits.get(name),
            settings.seed,
        )
        for name, drafter in drafters.items()
    )
    result = EvalResult(
        format=FORMAT,
        suite=settings.suite,
        conditions=describe_conditions(target, taken, settings, decode),
        arms=arms,
        noise_floor=_noise_floor(timings),
    )
    if earlier is not None:
        result = merge(earlier, result)
    if folder is not None:
        decode_text = target.tokenizer.decode if settings.samples else None
        write_eval(folder, result, records, decode_text=decode_text)
    return result


def _check(drafters: Mapping[str, Drafter], prompts: Prompts) -> None:
    if not drafters:
        raise ConfigError("no drafter to evaluate; pass drafters=[ngram] or a run folder")
    reserved = {BASELINE, AGAIN} & drafters.keys()
    if reserved:
        raise ConfigError(
            f"a drafter is named {sorted(reserved)[0]!r}, which is the word for decoding without "
            "one; give it another name"
        )
    empty = [domain for domain, items in prompts.items() if not items]
    if empty or not prompts:
        raise ConfigError(
            f"no evaluation prompt in {', '.join(empty) or 'any domain'}; expected at least one"
        )


def _take(prompts: Prompts, limit: int | None) -> list[_Place]:
    return [
        _Place(domain, index, tuple(ids))
        for domain, items in prompts.items()
        for index, ids in enumerate(items[:limit])
    ]


def _decoder(
    target: Target,
    drafter: Drafter | None,
    decode: DecodeSettings,
    length: int | None,
    *,
    wants_overlaps: bool = False,
) -> Decoder:
    settings = decode.model_copy(update={"num_draft_tokens": length})
    return Decoder(target, drafter, settings, wants_overlaps=wants_overlaps)


def _choose(
    target: Target,
    name: str,
    drafter: Drafter,
    validation: Prompts | None,
    settings: EvalSettings,
    decode: DecodeSettings,
    report: Progress,
) -> LengthChoice | None:
    is_given = decode.num_draft_tokens is not None or decode.tree is not None
    if not validation or not settings.draft_lengths or is_given:
        return None

    if decode.fallback:
        # a round that rests tells nothing of K; with fallback no round runs as a graph
        decode = decode.model_copy(update={"fallback": False, "graphs": "off"})

    def decoder_at(length: int) -> Answers:
        return _decoder(target, drafter, decode, length)

    deepest = drafter.max_draft_tokens or max(settings.draft_lengths)
    candidates = [k for k in settings.draft_lengths if k <= deepest] or [deepest]
    what = f"{name}: choosing K"
    report(what, 0, len(candidates))
    return choose_draft_length(
        decoder_at,
        _spread(validation, settings.draft_length_prompts),
        candidates,
        max_new_tokens=settings.speed_max_new_tokens,
        batch_size=settings.batch_size,
        progress=lambda done, total: report(what, done, total),
    )


def _spread(prompts: Prompts, limit: int) -> list[Sequence[int]]:
    """Take prompts from all domains in turn."""
    longest = max(len(items) for items in prompts.values())
    turns = [items[i] for i in range(longest) for items in prompts.values() if i < len(items)]
    return turns[:limit]


def _decode_batched(
    decoder: Decoder, places: Sequence[_Place], settings: EvalSettings, name: str, report: Progress
) -> list[Generation]:
    done = 0
    what = f"{name}: acceptance"
    report(what, 0, len(places))

    def count(generation: Generation) -> None:
        nonlocal done
        done += 1
        report(what, done, len(places))

    return decoder.generate(
        [place.ids for place in places],
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        on_finish=count,
    )


def _time_arms(
    target: Target,
    drafters: Mapping[str, Drafter],
    lengths: Mapping[str, int],
    timed: Sequence[_Place],
    settings: EvalSettings,
    decode: DecodeSettings,
    report: Progress,
) -> list[Timing]:
    plain = _decoder(target, None, decode, None)
    decoders: dict[str, Answers] = {BASELINE: plain}
    if settings.noise_floor:
        decoders[AGAIN] = plain
    for name, drafter in drafters.items():
        decoders[name] = _decoder(target, drafter, decode, lengths[name])
    return measure(
        decoders,
        [place.ids for place in timed],
        max_new_tokens=settings.speed_max_new_tokens,
        warmup_prompts=settings.warmup_prompts,
        repeats=settings.repeats,
        seed=settings.seed,
        clock=DeviceClock(target.device),
        progress=lambda done, total: report("speed at batch 1", done, total),
    )


def _audit_arms(
    target: Target,
    plans: Mapping[str, DraftPlan],
    timings: Sequence[Timing],
    settings: EvalSettings,
    decode: DecodeSettings,
    report: Progress,
) -> dict[str, AuditVerdict]:
    if not settings.audit:
        return {}
    # arms whose answers are equal share their scores, so a lossless run is scored once
    scores: dict[Answer, list[NarrowScore]] = {}
    verdicts = {}
    for name, plan in plans.items():
        mine, theirs = _ordered(timings, name), _ordered(timings, BASELINE)
        if not mine:
            continue
        verdicts[name] = audit(
            target,
            mine,
            baseline=theirs,
            sampling=decode.sampling,
            draft_width=plan.num_nodes,
            prefill_tokens=decode.prefill_tokens,
            ends_at_eos=not decode.ignore_eos,
            cache=scores,
            progress=lambda done, total, name=name: report(f"{name}: audit", done, total),
        )
    return verdicts


def _ordered(timings: Sequence[Timing], arm: str) -> list[Generation]:
    mine = sorted((t for t in timings if t.arm == arm), key=lambda t: (t.repeat, t.prompt))
    return [timing.generation for timing in mine]


def _arm_result(
    name: str,
    drafter: Drafter,
    plan: DraftPlan,
    choice: LengthChoice | None,
    places: Sequence[_Place],
    answers: Sequence[Generation],
    timed: Sequence[_Place],
    timings: Sequence[Timing],
    verdict: AuditVerdict | None,
    seed: int,
) -> ArmResult:
    domains = []
    for domain in dict.fromkeys(place.domain for place in places):
        mine = [g for g, place in zip(answers, places, strict=True) if place.domain == domain]
        indices = [i for i, place in enumerate(timed) if place.domain == domain]
        domains.append(
            DomainResult(
                domain=domain,
                acceptance=compute_acceptance(mine, seed=seed, depth=plan.depth),
                speed=compute_speed(timings, arm=name, baseline=BASELINE, prompts=indices),
            )
        )
    return ArmResult(
        name=name,
        kind=drafter.kind,
        num_parameters=num_trainable(drafter),
        num_draft_tokens=plan.depth,
        choice=choice,
        acceptance=compute_acceptance(answers, seed=seed, depth=plan.depth),
        speed=compute_speed(timings, arm=name, baseline=BASELINE),
        audit=verdict,
        domains=tuple(domains),
        is_lossy=any(answer.is_lossy for answer in answers),
        num_nodes=None if plan.shape is None else plan.num_nodes,
        folder=None if drafter.folder is None else str(drafter.folder),
    )


def _noise_floor(timings: Sequence[Timing]) -> Estimate | None:
    speed = compute_speed(timings, arm=AGAIN, baseline=BASELINE)
    return speed.speedup if speed else None
