"""The report's tables as plain data.

In: results. Out: `Table`s of text. Read first: Table, then domain_table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draftlab.evaluation.results import (
    MIN_PROMPTS_FOR_INTERVAL,
    AcceptanceStats,
    ArmResult,
    DomainResult,
    Estimate,
    EvalResult,
    SpeedStats,
)
from draftlab.reports import words
from draftlab.reports.facts import TrainingFacts


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: the figure.
        note: small print beside it, such as an interval.
    """

    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One row; the first cell names it.

    Attributes:
        cells: one a column.
        mark: a short word that singles the row out; empty for most.
    """

    cells: tuple[Cell, ...]
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a caption and remarks below it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()

    def has_notes(self, column: int) -> bool:
        """Whether any cell of a column has small print, so that its figures can be lined up."""
        return any(row.cells[column].note for row in self.rows)


def _cell(estimate: Estimate, digits: int = 2) -> Cell:
    return Cell(words.number(estimate.value, digits), words.interval(estimate, digits))


def _share_cell(estimate: Estimate) -> Cell:
    note = ""
    if estimate.low is not None and estimate.high is not None:
        note = f"{100 * estimate.low:.0f}–{100 * estimate.high:.0f}"
    return Cell(words.percent(estimate.value), note)


def summary_table(result: EvalResult) -> Table:
    """Set every drafter beside plain decoding."""
    rows = [
        Row(
            (
                Cell("no drafter"),
                Cell(words.NOTHING),
                Cell("1.00"),
                Cell(words.NOTHING),
                Cell(words.NOTHING),
                Cell("1.00"),
                Cell("1.00x"),
                Cell(words.NOTHING),
            )
        )
    ]
    for arm in result.arms:
        speed, audit = arm.speed, arm.audit
        rows.append(
            Row(
                (
                    Cell(arm.name, _size(arm)),
                    Cell(str(arm.num_draft_tokens), words.nodes(arm)),
                    _cell(arm.acceptance.tau),
                    _share_cell(arm.acceptance.alpha[0]) if arm.acceptance.alpha else Cell("–"),
                    _share_cell(arm.acceptance.acceptance_rate),
                    Cell(words.number(speed.step_ratio)) if speed else Cell(words.NOTHING),
                    _speedup_cell(speed.speedup) if speed else Cell("not timed"),
                    Cell(
                        f"{words.count(audit.num_defects)} of {words.count(audit.num_positions)}"
                        if audit
                        else "not audited"
                    ),
                ),
                mark="best" if len(result.arms) > 1 and arm == words.best_arm(result) else "",
            )
        )
    return Table(
        "Drafters",
        (
            "drafter",
            "K",
            "tau",
            "alpha 1",
            "acceptance rate",
            "cost of a step",
            "decode speedup",
            "defects",
        ),
        tuple(rows),
        (
            "Small figures are 95 % confidence intervals over prompts. tau says how well a drafter "
            "guesses; the speedup is tau divided by what a step costs, so the two can rank "
            "drafters differently.",
        ),
    )


def _size(arm: ArmResult) -> str:
    if arm.num_parameters == 0:
        return "nothing to train"
    return f"{words.weights(arm.num_parameters)} parameters"


def _speedup_cell(speedup: Estimate) -> Cell:
    if speedup.value is None:
        return Cell(words.NOTHING)
    if speedup.low is None:
        return Cell(f"{words.times(speedup.value)} *", f"n = {speedup.num_prompts}")
    return Cell(words.times(speedup.value), words.interval(speedup))


def domain_table(arm: ArmResult) -> Table:
    """Set one drafter out by domain, best first, the worst marked."""
    rated = [d for d in arm.domains if d.acceptance.tau.value is not None]
    worst = min(rated, key=lambda d: d.acceptance.tau.value or 0.0).domain if rated else None
    ordered = sorted(arm.domains, key=lambda d: -(d.acceptance.tau.value or 0.0))
    rows = [_domain_row(d, is_worst=d.domain == worst and len(rated) > 1) for d in ordered]
    rows.append(Row((Cell("all domains"), *_domain_cells(arm.acceptance, arm.speed)), mark="total"))
    slow = [
        d.domain
        for d in ordered
        if d.speed and d.speed.speedup.value is not None and d.speed.speedup.value < 1
    ]
    remarks = []
    if slow:
        remarks.append(f"Measured slower than plain decoding on: {', '.join(slow)}.")
    if any(d.speed and d.speed.speedup.low is None for d in arm.domains):
        remarks.append(
            f"* fewer than {MIN_PROMPTS_FOR_INTERVAL} prompts timed in this domain: the ratio is "
            "shown without an interval and supports no claim of its own."
        )
    return Table(
        f"{arm.name}, {words.draft_size(arm)}",
        (
            "domain",
            "prompts",
            "tau",
            "alpha 1",
            "acceptance rate",
            "repeats",
            "tau without repeats",
            "decode speedup",
        ),
        tuple(rows),
        tuple(remarks),
    )


def _domain_row(domain: DomainResult, *, is_worst: bool) -> Row:
    cells = (Cell(domain.domain), *_domain_cells(domain.acceptance, domain.speed))
    return Row(cells, mark="lowest tau" if is_worst else "")


def _domain_cells(acceptance: AcceptanceStats, speed: SpeedStats | None) -> tuple[Cell, ...]:
    return (
        Cell(words.count(acceptance.num_prompts)),
        _cell(acceptance.tau),
        _share_cell(acceptance.alpha[0]) if acceptance.alpha else Cell(words.NOTHING),
        _share_cell(acceptance.acceptance_rate),
        Cell(words.percent(acceptance.repeated_share.value)),
        Cell(words.number(acceptance.tau_without_repeats.value)),
        _speedup_cell(speed.speedup) if speed else Cell(words.NOTHING),
    )


def acceptance_table(result: EvalResult) -> Table:
    """Every definition of acceptance side by side, so that engines can be compared."""
    arms = result.arms
    depth = max((len(arm.acceptance.survival) for arm in arms), default=0)

    def row(name: str, cells: Sequence[Cell]) -> Row:
        return Row((Cell(name), *cells))

    rows = [
        row("tau, pooled", [_cell(a.acceptance.tau) for a in arms]),
        row("tau, per conversation", [_cell(a.acceptance.tau_macro) for a in arms]),
        row("tau, uncut", [_cell(a.acceptance.tau_uncut) for a in arms]),
        row("tau without repeats", [_cell(a.acceptance.tau_without_repeats) for a in arms]),
        row("accepted draft tokens a step", [_cell(a.acceptance.accepted_per_step) for a in arms]),
        row("acceptance rate", [_share_cell(a.acceptance.acceptance_rate) for a in arms]),
        row("steps with a draft", [_share_cell(a.acceptance.share_with_draft) for a in arms]),
        row("tokens inside repeats", [_share_cell(a.acceptance.repeated_share) for a in arms]),
    ]
    for name in ("survival", "alpha", "overlap"):
        for k in range(depth):
            of = [getattr(a.acceptance, name) for a in arms]
            if any(k < len(values) for values in of):
                rows.append(
                    row(
                        f"{name} {k + 1}",
                        [_share_cell(v[k]) if k < len(v) else Cell(words.NOTHING) for v in of],
                    )
                )
    rows.append(row("verify steps", [Cell(words.count(a.acceptance.num_steps)) for a in arms]))
    rows.append(row("tokens emitted", [Cell(words.count(a.acceptance.num_emitted)) for a in arms]))
    return Table(
        "Acceptance by every definition", ("figure", *(arm.name for arm in arms)), tuple(rows)
    )


def speed_table(result: EvalResult) -> Table | None:
    """Set out everything timed at batch 1; None when nothing was."""
    timed = [arm for arm in result.arms if arm.speed]
    if not timed:
        return None
    speeds = [arm.speed for arm in timed if arm.speed]

    def row(name: str, cells: Sequence[Cell]) -> Row:
        return Row((Cell(name), *cells))

    ms = words.milliseconds
    rows = [
        row("decode speedup", [_speedup_cell(s.speedup) for s in speeds]),
        row(
            "end-to-end speedup, with prefill",
            [_speedup_cell(s.end_to_end_speedup) for s in speeds],
        ),
        row(
            "by repeat",
            [Cell(", ".join(words.times(r) for r in s.speedup_by_repeat)) for s in speeds],
        ),
        row("decode time a token", [Cell(ms(s.token_s)) for s in speeds]),
        row("the same, baseline", [Cell(ms(s.baseline_token_s)) for s in speeds]),
        row("time to first token, median", [Cell(ms(s.first_token_s)) for s in speeds]),
        row("the same, baseline", [Cell(ms(s.baseline_first_token_s)) for s in speeds]),
        row("drafting / plain step", [Cell(words.number(s.draft_ratio)) for s in speeds]),
        row("verification / plain step", [Cell(words.number(s.verify_ratio)) for s in speeds]),
        row("whole verify step / plain step", [Cell(words.number(s.step_ratio)) for s in speeds]),
        row("tau on the timed answers", [Cell(words.number(s.tau)) for s in speeds]),
        row(
            "speedup if drafting and verification were all",
            [Cell(words.times(s.predicted_speedup)) for s in speeds],
        ),
        row(
            "tokens timed, drafter / baseline",
            [Cell(f"{words.count(s.tokens)} / {words.count(s.baseline_tokens)}") for s in speeds],
        ),
        row("prompts, repeats", [Cell(f"{s.num_prompts}, {s.num_repeats}") for s in speeds]),
    ]
    remarks = [
        "Batch 1, arms interleaved prompt by prompt in one process, in drawn order. Only decoding "
        "is sped up: the time to first token is prefill and stays as it is, or grows by what the "
        "drafter does with the prompt."
    ]
    noise = result.noise_floor
    if noise is not None:
        ci = words.interval(noise, 3)
        remarks.append(
            f"Noise floor: the baseline timed against itself gives {words.number(noise.value, 3)}"
            + (f" (95 % CI {ci})." if ci else ".")
            + " A speedup is claimed only beyond it."
        )
    else:
        remarks.append("The baseline was not timed against itself: no noise floor is known.")
    return Table(
        "Speed at batch 1", ("figure", *(arm.name for arm in timed)), tuple(rows), tuple(remarks)
    )


def length_table(arm: ArmResult) -> Table:
    """Show the K that were tried."""
    assert arm.choice is not None
    rows = [
        Row(
            (
                Cell(str(option.num_draft_tokens)),
                Cell(words.number(option.tau)),
                Cell(words.milliseconds(option.step_s)),
                Cell(f"{option.tokens_per_s:.1f}"),
            ),
            mark="chosen" if option.num_draft_tokens == arm.choice.num_draft_tokens else "",
        )
        for option in arm.choice.options
    ]
    prompts = words.plural(arm.choice.num_prompts, "validation prompt")
    return Table(
        f"Choice of K for {arm.name}",
        ("K", "tau", "verify step", "expected tokens/s"),
        tuple(rows),
        (f"On {prompts}. How: {arm.choice.method}.",),
    )


def defect_table(result: EvalResult) -> Table | None:
    """List the tokens that are not the target's; None without any."""
    rows = [
        Row(
            (
                Cell(arm.name),
                Cell(str(defect.prompt)),
                Cell(str(defect.position)),
                Cell(str(defect.emitted_id)),
                Cell(str(defect.expected_id)),
                Cell(f"{defect.margin:.3g}"),
            )
        )
        for arm in result.arms
        if arm.audit
        for defect in arm.audit.defects
    ]
    if not rows:
        return None
    columns = ("drafter", "answer", "position", "emitted id", "expected id", "margin")
    return Table("Defects", columns, tuple(rows))


def training_table(training: Sequence[TrainingFacts]) -> Table | None:
    """Say how the drafters were trained; None without any."""
    if not training:
        return None
    columns = (
        "drafter",
        "steps",
        "minutes",
        "conversations",
        "answer tokens",
        "weights of",
        "data",
    )
    rows = [
        Row(
            (
                Cell(facts.drafter),
                Cell(words.count(facts.num_steps)),
                Cell(words.number(facts.minutes, 1)),
                Cell(words.count(facts.num_conversations)),
                Cell(words.count(facts.num_tokens)),
                Cell(words.NOTHING if step is None else f"step {words.count(step)}"),
                Cell(facts.data),
            )
        )
        for facts, step in ((facts, facts.measured_step) for facts in training)
    ]
    return Table("Training", columns, tuple(rows))
