"""Families of drafters side by side: what each cost to train, what it is worth, what chose it.

In: one `FamilyResult` a family, evaluated under the same conditions. Out: `Table`s and plain data
of the same figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftlab.evaluation.results import ArmResult, Estimate
from draftlab.reports import words
from draftlab.reports.facts import TrainingFacts
from draftlab.reports.tables import Cell, Row, Table


@dataclass(frozen=True, slots=True)
class ProbePoint:
    """A look at the drafter while it was trained.

    Attributes:
        step: optimizer steps done.
        loss: mean of the training loss since the look before; None where none was logged.
        tau: acceptance length on validation prompts.
        tokens_per_s: modelled; None where it was not.
    """

    step: int
    loss: float | None
    tau: float
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """One family, trained and evaluated.

    Attributes:
        name: what tables call it.
        arm: its evaluation.
        training: how it was trained; None where nothing is known of that.
        probes: in order of steps.
    """

    name: str
    arm: ArmResult
    training: TrainingFacts | None
    probes: tuple[ProbePoint, ...]


def family_tables(results: Sequence[FamilyResult]) -> list[Table]:
    """Lay out the families: figures, acceptance by domain, and what each choice rests on."""
    tables = [_figures(results), _domains(results)]
    probed = [result for result in results if result.probes]
    return [*tables, _choices(probed)] if probed else tables


def family_data(result: FamilyResult) -> dict[str, Any]:
    """Give one family's figures as plain data."""
    arm, speed = result.arm, result.arm.speed
    return {
        "family": result.name,
        "num_parameters": arm.num_parameters,
        "training": None if result.training is None else asdict(result.training),
        "num_draft_tokens": arm.num_draft_tokens,
        "tau": asdict(arm.acceptance.tau),
        "tau_by_domain": {d.domain: asdict(d.acceptance.tau) for d in arm.domains},
        "draft_ratio": speed.draft_ratio if speed else None,
        "verify_ratio": speed.verify_ratio if speed else None,
        "step_ratio": speed.step_ratio if speed else None,
        "speedup": asdict(speed.speedup) if speed else None,
        "num_defects": arm.audit.num_defects if arm.audit else None,
        "probes": [asdict(probe) for probe in result.probes],
    }


def _figures(results: Sequence[FamilyResult]) -> Table:
    longest = _place_of_largest(results, lambda r: r.arm.acceptance.tau.value)
    fastest = _place_of_largest(
        results, lambda r: r.arm.speed.speedup.value if r.arm.speed else None
    )
    rows = []
    for place, result in enumerate(results):
        arm, speed, training = result.arm, result.arm.speed, result.training
        marks = [
            word
            for word, best in (("longest", longest), ("fastest", fastest))
            if best == place and len(results) > 1
        ]
        cells = [
            Cell(result.name),
            Cell(words.weights(arm.num_parameters, 2)),
            Cell(words.number(training.minutes, 1) if training else words.NOTHING),
            Cell(words.count(training.num_steps) if training else words.NOTHING),
            Cell(str(arm.num_draft_tokens)),
            _estimate(arm.acceptance.tau),
            Cell(words.number(speed.draft_ratio)) if speed else Cell(words.NOTHING),
            Cell(words.number(speed.step_ratio)) if speed else Cell(words.NOTHING),
            _speedup(speed.speedup) if speed else Cell("not timed"),
            Cell(words.count(arm.audit.num_defects) if arm.audit else "not audited"),
        ]
        rows.append(Row(tuple(cells), mark=", ".join(marks)))
    return Table(
        "Families",
        (
            "family",
            "trained parameters",
            "minutes",
            "steps",
            "K",
            "tau",
            "t_draft/t_AR",
            "t_step/t_AR",
            "decode speedup",
            "defects",
        ),
        tuple(rows),
        (
            "tau: tokens a verify step, all domains pooled. In brackets 95 % intervals over "
            "prompts. K: chosen on validation prompts, for each family. t_AR: a step of plain "
            "decoding. Speedup: over plain decoding of the same prompts in the same process, "
            "batch 1. Minutes: of optimizer steps.",
        ),
    )


def _domains(results: Sequence[FamilyResult]) -> Table:
    names = list(dict.fromkeys(d.domain for result in results for d in result.arm.domains))
    taus = [{d.domain: d.acceptance.tau for d in result.arm.domains} for result in results]
    rows = []
    for name in names:
        cells = [_estimate(of[name]) if name in of else Cell(words.NOTHING) for of in taus]
        rows.append(Row((Cell(name), *cells)))
    totals = (_estimate(result.arm.acceptance.tau) for result in results)
    rows.append(Row((Cell("all domains"), *totals)))
    return Table("tau by domain", ("domain", *(result.name for result in results)), tuple(rows))


def _choices(results: Sequence[FamilyResult]) -> Table:
    rows = []
    for result in results:
        probes = result.probes
        places = (
            _place_of_largest(probes, lambda p: p.tau),
            _place_of_largest(probes, lambda p: p.tokens_per_s),
            _place_of_largest(probes, lambda p: None if p.loss is None else -p.loss),
        )
        cells = [Cell(result.name), Cell(str(len(probes)))]
        cells += [_chosen(probes, place) for place in places]
        steps = {probes[place].step for place in places if place is not None}
        cells.append(Cell("agree" if len(steps) == 1 else "disagree"))
        rows.append(Row(tuple(cells)))
    return Table(
        "Which checkpoint is best depends on what is asked",
        ("family", "probes", "best by tau", "best by modelled tokens/s", "lowest loss", "they"),
        tuple(rows),
        (
            "Each cell: the step, and in brackets tau and modelled tokens/s there, on validation "
            "prompts. Loss: mean of the training loss since the probe before.",
        ),
    )


def _chosen(probes: Sequence[ProbePoint], place: int | None) -> Cell:
    if place is None:
        return Cell(words.NOTHING)
    probe = probes[place]
    speed = "" if probe.tokens_per_s is None else f", {probe.tokens_per_s:.1f} tokens/s"
    return Cell(f"step {probe.step}", f"{probe.tau:.3f}{speed}")


def _place_of_largest(items: Sequence[Any], of: Callable[[Any], float | None]) -> int | None:
    known = [(value, -place) for place, item in enumerate(items) if (value := of(item)) is not None]
    return -max(known)[1] if known else None  # the first of equals


def _estimate(estimate: Estimate) -> Cell:
    return Cell(words.number(estimate.value), words.interval(estimate))


def _speedup(speedup: Estimate) -> Cell:
    return Cell(words.times(speedup.value), words.interval(speedup))
