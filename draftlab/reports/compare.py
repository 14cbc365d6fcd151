"""Two evaluations side by side, prompts paired, or a refusal that names what differs.

In: two `Evaluation`s of the same conditions. Out: a `Table`. Read first: compare.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftlab.errors import ConfigError
from draftlab.evaluation.files import Evaluation
from draftlab.evaluation.intervals import paired_estimate
from draftlab.evaluation.results import (
    BASELINE,
    ArmResult,
    Estimate,
    EvalResult,
    differing_conditions,
    differing_drafts,
)
from draftlab.reports import words
from draftlab.reports.tables import Cell, Row, Table

_ROUNDING = 1e-9


def compare(first: Evaluation, second: Evaluation, names: tuple[str, str] = ("A", "B")) -> Table:
    """Set two evaluations of the same prompts beside each other.

    Args:
        first: the reference.
        second: what is compared with it.
        names: what the two are called.

    Raises:
        ConfigError: the conditions differ, naming each, or the two share no drafter.
    """
    one, two = first.result, second.result
    differing = differing_conditions(one, two)
    if differing:
        raise ConfigError(
            f"{names[0]} and {names[1]} cannot be compared, their conditions differ: "
            + "; ".join(differing)
            + "; evaluate both under the same conditions"
        )
    rows: list[Row] = []
    unpaired: list[str] = []
    for mine, theirs in _pair_arms(one, two):
        label = mine.name if mine.name == theirs.name else f"{mine.name} / {theirs.name}"
        pair = _Pair(_sums(first, mine.name), _sums(second, theirs.name))
        rows.append(
            _row(f"{label}: tau", mine.acceptance.tau, theirs.acceptance.tau, pair.tau_change())
        )
        others = {d.domain: d for d in theirs.domains}
        for domain in mine.domains:
            other = others.get(domain.domain)
            if other is not None:
                rows.append(
                    _row(
                        f"{label}: tau, {domain.domain}",
                        domain.acceptance.tau,
                        other.acceptance.tau,
                        pair.tau_change(domain.domain),
                    )
                )
        if mine.speed and theirs.speed:
            name, speeds = f"{label}: decode speedup", (mine.speed.speedup, theirs.speed.speedup)
            plain = _Pair(_own_baseline(first, mine), _own_baseline(second, theirs))
            if plain.first and plain.second:
                rows.append(_row(name, *speeds, pair.speedup_change(plain)))
            else:
                unpaired.append(label)
                rows.append(_row(name, *speeds, _ratio(*speeds), reading="no interval"))
        if mine.audit and theirs.audit:
            defects = mine.audit.num_defects, theirs.audit.num_defects
            cells = (Cell(words.count(defects[0])), Cell(words.count(defects[1])))
            change_cell = Cell(f"{defects[1] - defects[0]:+d}")
            rows.append(Row((Cell(f"{label}: defects"), *cells, change_cell, Cell(""))))
    drafts = differing_drafts(one, two)
    lossy = dict.fromkeys(arm.name for arm in (*one.arms, *two.arms) if arm.is_lossy)
    remarks = []
    if drafts:
        remarks.append(f"Drafted differently: {'; '.join(drafts)}.")
    if unpaired:
        remarks.append(
            f"{', '.join(unpaired)}: the baseline's answers that it was timed beside are not kept, "
            "so the change of its speedup is that of the two figures, without an interval."
        )
    remarks += [
        f"{name}: not lossless, its answers do not have the target's law." for name in lossy
    ]
    return Table(
        f"{names[1]} against {names[0]}",
        ("figure", *names, "change", "reading"),
        tuple(rows),
        (
            "Change is the ratio of the two figures with a 95 % interval, prompts paired. Domains "
            "are many: of twelve without any difference, one in two tables shows one by chance.",
            *remarks,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of one arm and prompt: tokens decoded, verify steps, decode seconds."""

    tokens: int
    steps: int
    seconds: float


_Place = tuple[str, str, int]


def _sums(evaluation: Evaluation, arm: str) -> dict[_Place, _Sums]:
    return _add_up([row for row in evaluation.answers if row["arm"] == arm])


def _add_up(rows: Sequence[Mapping[str, Any]]) -> dict[_Place, _Sums]:
    """Add up the repeats of each (phase, domain, prompt)."""
    sums: dict[_Place, _Sums] = {}
    for row in rows:
        place = (row["phase"], row["domain"], row["prompt"])
        old = sums.get(place, _Sums(0, 0, 0.0))
        sums[place] = _Sums(
            old.tokens + row["num_decoded_tokens"],
            old.steps + row["num_steps"],
            old.seconds + row["decode_s"],
        )
    return sums


def _own_baseline(evaluation: Evaluation, arm: ArmResult) -> dict[_Place, _Sums]:
    """Add up the baseline that an arm was timed beside; nothing where its lines are gone.

    Older files do not say which that is and keep the last stage's: what they hold is an arm's own
    if it is as fast as the arm's figures say.
    """
    rows = [row for row in evaluation.answers if row["arm"] == BASELINE]
    noted = [row for row in rows if arm.name in row.get("beside", ())]
    if noted:
        return _add_up(noted)
    sums = _add_up([row for row in rows if "beside" not in row])
    mine = _sums(evaluation, arm.name)
    timed = [s for place, s in sums.items() if s.tokens and place in mine and mine[place].tokens]
    tokens, seconds = sum(s.tokens for s in timed), sum(s.seconds for s in timed)
    expected = arm.speed.baseline_token_s if arm.speed else math.nan
    return sums if tokens and math.isclose(seconds / tokens, expected, rel_tol=1e-6) else {}


def _ratio(first: Estimate, second: Estimate) -> Estimate:
    """Give the change of two figures whose prompts cannot be paired."""
    value = second.value / first.value if first.value and second.value else None
    return Estimate(value, None, None, min(first.num_prompts, second.num_prompts), "none")


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same arm in two evaluations."""

    first: dict[_Place, _Sums]
    second: dict[_Place, _Sums]

    def tau_change(self, domain: str | None = None) -> Estimate:
        """Estimate tau of the second over tau of the first."""
        places = [
            place
            for place in self.first
            if place in self.second and place[0] == "acceptance" and domain in (None, place[1])
        ]
        return paired_estimate(
            over=[_column(self.second, places, _tokens), _column(self.first, places, _steps)],
            under=[_column(self.second, places, _steps), _column(self.first, places, _tokens)],
        )

    def speedup_change(self, plain: "_Pair") -> Estimate:
        """Estimate the second speedup over the first, each against its own baseline."""
        every = (self.first, self.second, plain.first, plain.second)
        places = [
            place
            for place in self.first
            if place[0] == "speed" and all(place in sums and sums[place].tokens for sums in every)
        ]
        return paired_estimate(
            over=[
                _column(self.second, places, _tokens),
                _column(self.first, places, _seconds),
                _column(plain.second, places, _seconds),
                _column(plain.first, places, _tokens),
            ],
            under=[
                _column(self.second, places, _seconds),
                _column(self.first, places, _tokens),
                _column(plain.second, places, _tokens),
                _column(plain.first, places, _seconds),
            ],
        )


def _column(
    sums: dict[_Place, _Sums], places: list[_Place], of: Callable[[_Sums], float]
) -> list[float]:
    return [float(of(sums[place])) for place in places]


def _tokens(sums: _Sums) -> int:
    return sums.tokens


def _steps(sums: _Sums) -> int:
    return sums.steps


def _seconds(sums: _Sums) -> float:
    return sums.seconds


def _pair_arms(first: EvalResult, second: EvalResult) -> list[tuple[ArmResult, ArmResult]]:
    """Pair drafters of one name; two evaluations of one drafter each are paired whatever it is."""
    if len(first.arms) == len(second.arms) == 1:
        return [(first.arms[0], second.arms[0])]
    names = {arm.name: arm for arm in second.arms}
    pairs = [(arm, names[arm.name]) for arm in first.arms if arm.name in names]
    if not pairs:
        raise ConfigError(
            "the two evaluations share no drafter: "
            f"{', '.join(a.name for a in first.arms)} against {', '.join(names)}; "
            "evaluate a drafter of the same name in both"
        )
    return pairs


def _row(name: str, one: Estimate, two: Estimate, change: Estimate, *, reading: str = "") -> Row:
    told = Cell(reading or _reading(change))
    return Row((Cell(name), _figure(one), _figure(two), _change(change), told))


def _figure(estimate: Estimate) -> Cell:
    return Cell(words.number(estimate.value), words.interval(estimate))


def _change(change: Estimate) -> Cell:
    def signed(value: float) -> str:
        # + 0.0 turns a rounded -0.0 into 0.0
        return f"{round(100 * (value - 1), 1) + 0.0:+.1f}"

    if change.value is None:
        return Cell(words.NOTHING)
    if change.low is None or change.high is None:
        return Cell(f"{signed(change.value)} %")
    return Cell(f"{signed(change.value)} %", f"{signed(change.low)} to {signed(change.high)}")


def _reading(change: Estimate) -> str:
    if change.low is None or change.high is None:
        return "too few prompts to tell"
    if change.low > 1 + _ROUNDING:
        return "higher"
    return "lower" if change.high < 1 - _ROUNDING else "no clear difference"
