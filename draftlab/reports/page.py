"""The report as plain data: what is said, in which order. html.py and markdown.py only set it.

In: `ReportInput`. Out: `Page`. Read first: build_page.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.evaluation.results import EvalResult
from draftlab.reports import words
from draftlab.reports.facts import ReportInput, Sample
from draftlab.reports.tables import (
    Table,
    acceptance_table,
    defect_table,
    domain_table,
    length_table,
    speed_table,
    summary_table,
    training_table,
)
from draftlab.targets.spec import name_with_quantisation


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure to be seen first."""

    value: str
    label: str
    note: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that a report says, without its plots."""

    title: str
    subtitle: str
    verdict: words.Verdict
    tiles: tuple[Tile, ...]
    summary: Table
    domains: tuple[Table, ...]
    acceptance: Table
    speed: Table | None
    lengths: tuple[Table, ...]
    lossless: tuple[str, ...]
    defects: Table | None
    training: Table | None
    conditions: tuple[tuple[str, str], ...]
    not_measured: tuple[str, ...]
    samples: tuple[Sample, ...]


def build_page(given: ReportInput) -> Page:
    """Arrange an evaluation, and what is known of the training, for reading."""
    result = given.result
    target = result.conditions.details.get("target", {})
    name = str(target.get("name", result.conditions.comparable.get("target", "target")))
    name = name_with_quantisation(name, str(target.get("quantisation", "none")))
    return Page(
        title=f"Speculative decoding of {name}",
        subtitle=_subtitle(given, target),
        verdict=words.verdict(result),
        tiles=_tiles(result),
        summary=summary_table(result),
        domains=tuple(domain_table(arm) for arm in result.arms),
        acceptance=acceptance_table(result),
        speed=speed_table(result),
        lengths=tuple(length_table(arm) for arm in result.arms if arm.choice),
        lossless=_lossless(result),
        defects=defect_table(result),
        training=training_table(given.training),
        conditions=(*_origin(given), *_conditions(result), *_others(given)),
        not_measured=_not_measured(given),
        samples=tuple(given.samples),
    )


def _subtitle(given: ReportInput, target: dict[str, Any]) -> str:
    parts = [given.run, f"suite {given.result.suite}", f"weights {target.get('dtype', 'unknown')}"]
    return " · ".join(part for part in parts if part)


def _tiles(result: EvalResult) -> tuple[Tile, ...]:
    best = words.best_arm(result)
    tau = best.acceptance.tau
    tiles = []
    if best.speed:
        speedup = best.speed.speedup
        ci = words.interval(speedup)
        tiles += [
            Tile(
                words.times(speedup.value),
                f"decode speed of {best.name}",
                f"95 % CI {ci}" if ci else "too few prompts for an interval",
            ),
            Tile(
                f"{1 / best.speed.token_s:.0f} tokens/s",
                "one user at a time",
                f"{1 / best.speed.baseline_token_s:.0f} without drafting",
            ),
        ]
    ci = words.interval(tau)
    tiles.append(
        Tile(
            words.number(tau.value),
            "tokens a verify step (tau)",
            f"95 % CI {ci}" if ci else words.plural(tau.num_prompts, "prompt"),
        )
    )
    audits = [arm.audit for arm in result.arms if arm.audit]
    if audits:
        tiles.append(
            Tile(
                words.plural(sum(a.num_defects for a in audits), "defect"),
                "LOSSY: audit of p > 0 alone"
                if any(arm.is_lossy for arm in result.arms)
                else "losslessness audit",
                f"in {words.plural(sum(a.num_positions for a in audits), 'position')}",
            )
        )
    return tuple(tiles)


def _lossless(result: EvalResult) -> tuple[str, ...]:
    lines = []
    for arm in result.arms:
        if arm.audit is None:
            lines.append(f"{arm.name}: not audited.")
            continue
        audit = arm.audit
        lines.append(f"{arm.name}: {words.audit_words(audit, is_lossy=arm.is_lossy)}")
        if audit.is_greedy and audit.requires_identity:
            lines.append(
                f"{arm.name}: wide and narrow passes of this target were found bitwise equal at "
                "load, so every token had to be the target's own choice; no tolerance was applied."
            )
        elif audit.is_greedy and audit.num_ties + audit.num_defects == 0:
            lines.append(
                f"{arm.name}: every token is the target's own first choice; no tolerance needed."
            )
        elif audit.is_greedy:
            lines.append(
                f"{arm.name}: a token up to {audit.tolerance:.3g} logit units below the largest "
                "counts as a numerical tie (twice the 99.9th percentile of what a wide pass moves "
                f"logits on the same prefixes); largest margin seen: {audit.worst_margin:.3g}."
            )
        if audit.first_divergence is not None:
            lines.append(
                f"{arm.name}: where an answer differs from plain decoding, it first does so at "
                f"token {audit.first_divergence:.0f} (median)."
            )
    lines.append(
        "How: each token of the very answers that were timed is scored again by the target alone, "
        "its prefix given and one token a pass, as in plain decoding."
    )
    return tuple(lines)


def _conditions(result: EvalResult) -> tuple[tuple[str, str], ...]:
    same, details = result.conditions.comparable, result.conditions.details
    target, machine = details.get("target", {}), details.get("machine", {})
    settings = details.get("eval", {})
    versions = details.get("versions", {})
    domains = same.get("domains", {})
    rows: list[tuple[str, Any]] = [
        ("target", target.get("name")),
        ("source", target.get("source")),
        ("quantisation", same.get("quantisation")),
        ("weights as", same.get("dtype")),
        ("weights sha256", str(same.get("weights", ""))[:16]),
        ("forward pass", same.get("kernels")),
        ("attention", same.get("attention")),
        ("wide pass equals narrow pass, bitwise", _yes_no(details.get("rows_bitwise_equal"))),
        ("baseline", details.get("baseline")),
        ("machine", machine.get("system")),
        ("processor", same.get("cpu")),
        ("cores, threads", f"{machine.get('cores')}, {same.get('threads')}"),
        ("GPU", ", ".join(same.get("gpus", [])) or "none"),
        ("device", same.get("device")),
        ("prompts", f"{sum(domains.values())} in {len(domains)} domains"),
        ("prompts sha256", str(same.get("prompts_sha256", ""))[:16]),
        ("temperature", _sampling(same)),
        (
            "acceptance",
            f"up to {same.get('max_new_tokens')} tokens an answer, batch {same.get('batch_size')}",
        ),
        (
            "speed",
            f"up to {same.get('speed_max_new_tokens')} tokens an answer, batch 1, "
            f"{words.plural(settings.get('warmup_prompts', 0), 'warm-up prompt')}, "
            f"{words.plural(settings.get('repeats', 1), 'repeat')}",
        ),
        *_drafting(details),
        ("drafts", ", ".join(f"{arm.name} {words.draft_size(arm)}" for arm in result.arms)),
        ("seed", settings.get("seed")),
        ("versions", ", ".join(f"{name} {v}" for name, v in versions.items() if v)),
    ]
    return tuple((name, str(value)) for name, value in rows if value not in (None, ""))


def _origin(given: ReportInput) -> tuple[tuple[str, str], ...]:
    """Say which command measured, and when it began."""
    if not given.provenance:
        return ()
    program, *rest = shlex.split(given.provenance["command"])
    # where the program lies says nothing on another machine
    command = shlex.join([Path(program).name, *rest])
    return (("command", command), ("begun", given.provenance["time"]))


def _others(given: ReportInput) -> tuple[tuple[str, str], ...]:
    if not given.others:
        return ()
    return (("also measured", f"{', '.join(given.others)}: reports in eval/ of the run"),)


def _drafting(details: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Say how drafts were made and judged; of older results only the rule is known."""
    rule = details.get("rule")
    rows = [("acceptance rule", "auto: the best exact one" if rule == "auto" else rule)]
    if "tree" in details:
        tree = details["tree"] or {"kind": "chain"}
        rest = [f"{key} {value}" for key, value in tree.items() if key != "kind"]
        rows += [
            ("shape of drafts", ", ".join([tree["kind"] + (" tree" if rest else ""), *rest])),
            ("drafts end below a confidence of", details["min_confidence"]),
            (
                "fallback",
                "plain decoding while drafting does not pay" if details["fallback"] else None,
            ),
        ]
    return tuple((name, str(value)) for name, value in rows if value is not None)


def _yes_no(value: Any) -> str:
    return "not probed" if value is None else "yes" if value else "no"


def _sampling(same: dict[str, Any]) -> str:
    temperature = same.get("temperature")
    known = ("top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty")
    known += ("presence_penalty", "logit_bias", "min_new_tokens", "stop")
    on = [f"{key} {same[key]}" for key in known if same.get(key) is not None]
    return ", ".join(["0 (greedy)" if temperature == 0 else str(temperature), *on])


def _not_measured(given: ReportInput) -> tuple[str, ...]:
    result = given.result
    greedy = result.conditions.comparable.get("temperature") == 0
    lines = [f"{name}: still to be trained or measured." for name in given.pending]
    if greedy:
        lines.append("Sampled decoding: acceptance and speed at temperatures above 0.")
    else:
        lines.append(
            "Whether sampled outputs follow the target's law: that needs a two-sample test; the "
            "audit here only checks that each token had probability above 0. draftlab audit "
            "runs one."
        )
    lines += [
        "Speed with more than one request at a time: drafting gains less as the batch grows.",
        "Latency percentiles (p95, p99), memory, energy and cost.",
        "Prompts and answers longer than those listed under conditions.",
    ]
    if any(arm.speed is None for arm in result.arms):
        untimed = ", ".join(arm.name for arm in result.arms if arm.speed is None)
        lines.append(f"Speed of {untimed}.")
    if any(arm.audit is None for arm in result.arms):
        lines.append("Losslessness of drafters marked as not audited.")
    if result.noise_floor is None:
        lines.append("The noise floor of the timing on this machine.")
    return tuple(lines)
