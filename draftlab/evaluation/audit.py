"""The user's own audit: does this drafter change what this target says, in this dtype, here?

In: a target, a drafter, prompts. Out: `AuditReport`. Read audit_drafter first.

- Greedy: every token again by the target alone, one token wide (lossless.py); beside it plain
  decoding at another batch width, whose forks are what rounding does without any drafter.
- Sampled: many short answers with drafts and without, compared as draws of one law (two_sample.py),
  and how far the laws themselves differ between narrow and wide passes.
- rule=sampled_verify besides: the very tokens of plain sampling with the same seed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.records import Generation
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.verify import choose_rule
from draftlab.drafters.base import Drafter
from draftlab.drafters.tree import DynamicTree
from draftlab.errors import ConfigError
from draftlab.evaluation.audit_draws import compare_arms, draw_both
from draftlab.evaluation.audit_results import (
    AuditReport,
    DraftCounts,
    GreedyPart,
    SampledPart,
)
from draftlab.evaluation.audit_seed import check_same_seed
from draftlab.evaluation.audit_settings import AuditSettings
from draftlab.evaluation.conditions import describe_law, hash_prompts
from draftlab.evaluation.forced import Answer
from draftlab.evaluation.lossless import NarrowScore, audit, measure_gap
from draftlab.evaluation.results import AuditVerdict
from draftlab.randomness import derive_seed
from draftlab.runs.provenance import describe_machine, describe_versions
from draftlab.targets.target import Target

Progress = Callable[[str, int, int], None]

_GAP_ANSWERS = 8
# of a measured gap, what rounding may do elsewhere
_SAFETY = 2.0


def audit_drafter(
    target: Target,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    settings: AuditSettings,
    decode: DecodeSettings,
    *,
    progress: Progress | None = None,
) -> AuditReport:
    """Audit one drafter.

    Args:
        target: in the dtype that is asked about.
        drafter: of any kind.
        prompts: domain -> token ids.
        settings: how much is looked at.
        decode: how answers are decoded; at temperature 0 the sampled part is left out.
        progress: called with (what is being done, done, in all).

    Raises:
        ConfigError: no prompt, or a rule and a draft shape that do not go together.
    """
    report = progress or (lambda what, done, total: None)
    chosen = _take(prompts, settings.prompts)
    greedy = Decoder(target, drafter, _greedy(decode, settings))
    # built before anything runs, so that a rule that cannot be is refused at once
    sampled = None
    if decode.temperature > 0:
        sampled = Decoder(target, drafter, _sampled(decode, settings, "drafted"))
    return AuditReport(
        drafter=drafter.kind,
        num_draft_tokens=greedy.num_draft_tokens,
        greedy=_audit_greedy(greedy, chosen, settings, report),
        sampled=None if sampled is None else _audit_sampled(sampled, chosen, settings, report),
        conditions=_describe(target, chosen, settings, decode),
    )


def _take(prompts: Mapping[str, Sequence[Sequence[int]]], count: int) -> list[Sequence[int]]:
    """Take prompts from all domains in turn."""
    longest = max((len(items) for items in prompts.values()), default=0)
    turns = [items[i] for i in range(longest) for items in prompts.values() if i < len(items)]
    if not turns:
        raise ConfigError("no prompt to audit on; pass eval.prompts=FILE, or builtin")
    return turns[:count]


def _greedy(decode: DecodeSettings, settings: AuditSettings) -> DecodeSettings:
    """Decode as asked, but at temperature 0."""
    changes = {
        "rule": "auto",
        "lossy": False,
        "lossy_epsilon": None,
        "lossy_delta": None,
        "lossy_threshold": None,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "max_new_tokens": settings.max_new_tokens,
        "min_new_tokens": min(decode.min_new_tokens, settings.max_new_tokens),
    }
    return decode.model_copy(update=changes)


def _sampled(decode: DecodeSettings, settings: AuditSettings, arm: str) -> DecodeSettings:
    """Decode as asked, from a stream of its own."""
    seed = derive_seed("audit", arm, settings.seed, decode.seed)
    changes = {
        "seed": seed,
        "max_new_tokens": settings.max_new_tokens,
        "min_new_tokens": min(decode.min_new_tokens, settings.sampled_tokens),
    }
    return decode.model_copy(update=changes)


# ---------------------------------------------------------------------------------- greedy


def _audit_greedy(
    decoder: Decoder, prompts: list[Sequence[int]], settings: AuditSettings, report: Progress
) -> GreedyPart:
    target, decode = decoder.target, decoder.settings
    plain = Decoder(target, None, decode)
    # another width than 1; a lone prompt is its own neighbour
    crowd = prompts if len(prompts) > 1 else prompts * 2
    width = min(settings.batch_size, len(crowd))
    drafted = _answer(decoder, prompts, "greedy answers with drafts", report)
    narrow = _answer(plain, prompts, "plain answers", report, batch_size=1)
    wide = _answer(plain, crowd, f"plain answers, {width} at once", report, batch_size=width)
    scores: dict[Answer, list[NarrowScore]] = {}

    def judge(answers: Sequence[Generation], what: str) -> AuditVerdict:
        return audit(
            target,
            answers,
            baseline=narrow,
            sampling=decode.sampling,
            draft_width=decoder.plan.num_nodes,
            prefill_tokens=decode.prefill_tokens,
            ends_at_eos=not decode.ignore_eos,
            cache=scores,
            progress=lambda done, total: report(what, done, total),
        )

    return GreedyPart(
        verdict=judge(drafted, "their tokens again, one at a time"),
        noise=judge(wide[: len(prompts)], f"tokens of {width} at once again"),
        noise_width=width,
        drafts=_count_drafts(drafted),
    )


def _answer(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    what: str,
    report: Progress,
    *,
    batch_size: int | None = None,
) -> list[Generation]:
    done = 0

    def count(generation: Generation) -> None:
        nonlocal done
        done += 1
        report(what, done, len(prompts))

    report(what, 0, len(prompts))
    return decoder.generate(prompts, batch_size=batch_size, on_finish=count)


def _count_drafts(answers: Sequence[Generation]) -> DraftCounts:
    steps = [step for answer in answers for step in answer.steps]
    return DraftCounts(sum(s.num_drafted for s in steps), sum(s.num_accepted for s in steps))


# --------------------------------------------------------------------------------- sampled


def _audit_sampled(
    decoder: Decoder, prompts: list[Sequence[int]], settings: AuditSettings, report: Progress
) -> SampledPart:
    target, decode = decoder.target, decoder.settings
    plain = Decoder(target, None, _sampled(decode, settings, "plain"))
    asked = sorted(prompts, key=len)[: settings.sampled_prompts]
    mine, theirs = draw_both(
        target,
        plain,
        decoder,
        asked,
        settings,
        prefill_tokens=decode.prefill_tokens,
        progress=lambda done, total: report(
            "sampled answers" if settings.samples else "sampled answers, seconds", done, total
        ),
    )
    tests = compare_arms(mine, theirs, alpha=settings.alpha)
    rule = _rule_of(decoder)
    alone: list[Generation] = []
    if rule == "sampled_verify":
        twin = Decoder(target, None, decode)
        alone = _answer(twin, prompts, "plain answers, same seed", report)
    pairs = [(g.prompt_ids, g.output_ids) for g in alone] or mine.sample
    report("narrow and wide passes", 0, 1)
    gap = measure_gap(
        target,
        pairs[:_GAP_ANSWERS],
        width=decoder.plan.num_nodes + 1,
        prefill_tokens=decode.prefill_tokens,
        sampling=decode.sampling,
    )
    report("narrow and wide passes", 1, 1)
    same_seed = None
    if alone:
        drafted = _answer(decoder, prompts, "answers with drafts, same seed", report)
        same_seed = check_same_seed(
            target,
            alone,
            drafted,
            sampling=decode.sampling,
            seed=decode.seed,
            # 0, so identity, where passes of this width were found equal on these very answers
            tolerance=_SAFETY * gap.worst_tv,
            prefill_tokens=decode.prefill_tokens,
        )
    return SampledPart(
        rule=rule,
        is_lossy=decoder.is_lossy,
        sampling=describe_law(decode),
        num_prompts=len(asked),
        num_draws=len(mine.lengths),
        num_tokens=sum(theirs.lengths),
        drafts=theirs.drafts,
        alpha=settings.alpha,
        tests=tests,
        mean_tv=gap.mean_tv,
        worst_tv=gap.worst_tv,
        num_compared=gap.num_positions,
        same_seed=same_seed,
    )


def _rule_of(decoder: Decoder) -> str:
    """Name the rule that runs; auto names none."""
    shape, decode = decoder.plan.shape, decoder.settings
    if decode.rule != "auto":
        return decode.rule
    is_drawn = not isinstance(shape, DynamicTree)
    is_tree = shape is not None
    return choose_rule("auto", greedy=False, tree=is_tree, draws=is_drawn, lossy=False).name


def _describe(
    target: Target,
    prompts: Sequence[Sequence[int]],
    settings: AuditSettings,
    decode: DecodeSettings,
) -> dict[str, Any]:
    spec, machine = target.spec, describe_machine()
    return {
        "target": spec.to_json(),
        "dtype": spec.dtype,
        "kernels": target.report.get("kernels"),
        "attention": target.report.get("attention"),
        "device": str(target.device),
        "rows_bitwise_equal": target.report.get("rows_bitwise_equal"),
        "machine": machine,
        "versions": describe_versions(),
        "prompts_sha256": hash_prompts({"audit": prompts}),
        "audit": settings.model_dump(mode="json"),
        "decode": decode.model_dump(mode="json"),
    }
