"""The table at the end of a training: where loss, acceptance and speed disagree.

In: the run's numbers. Out: one line a probe, a star at each column's best; and warnings where the
numbers are not to be trusted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProbeLine:
    """One probe.

    Attributes:
        step: optimizer steps done.
        loss: mean of the training loss over the steps since the probe before.
        tau: acceptance length on validation prompts.
        tokens_per_s: modelled, None where it was not.
    """

    step: int
    loss: float | None
    tau: float
    tokens_per_s: float | None


def list_probes(numbers: Iterable[Mapping[str, Any]]) -> list[ProbeLine]:
    """Read the probes out of a run's metrics, in order of steps."""
    before, num_steps, loss_sum = 0, 0, 0.0
    lines = []
    for row in sorted(numbers, key=lambda row: (row["step"], row["split"] != "train")):
        if "train/loss" in row:
            # a line is the mean over the steps since the line before; null was no number
            if row["train/loss"] is not None:
                num_steps += row["step"] - before
                loss_sum += row["train/loss"] * (row["step"] - before)
            before = row["step"]
        if "accept/tau" in row:
            loss = loss_sum / num_steps if num_steps else None
            lines.append(
                ProbeLine(row["step"], loss, row["accept/tau"], row.get("accept/tokens_per_s"))
            )
            num_steps, loss_sum = 0, 0.0
    return lines


def describe_probes(lines: list[ProbeLine], best_by: str) -> str:
    """Lay the probes out, and say whether the columns agree on the best step.

    Args:
        lines: at least one.
        best_by: what `best` was chosen by.
    """
    columns = {
        "loss": [None if line.loss is None else -line.loss for line in lines],
        "tau": [line.tau for line in lines],
        "tokens_per_s": [line.tokens_per_s for line in lines],
    }
    best = {name: _place_of_largest(column) for name, column in columns.items()}
    rows = [["step", "loss ", "tau ", "tokens/s "]]
    for place, line in enumerate(lines):
        cells = (
            ("loss", line.loss, ".4f"),
            ("tau", line.tau, ".3f"),
            ("tokens_per_s", line.tokens_per_s, ".1f"),
        )
        marked = [_cell(value, form, is_best=best[name] == place) for name, value, form in cells]
        rows.append([str(line.step), *marked])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    steps = {name: lines[place].step for name, place in best.items() if place is not None}
    said = ", ".join(f"{_WORDS[name]} at step {step}" for name, step in steps.items())
    verdict = "they agree" if len(set(steps.values())) == 1 else "they disagree"
    return "\n".join(
        [
            "probes (* best of its column; tokens/s modelled at batch 1):",
            *table,
            f"best {said}: {verdict}; `best` follows {_WORDS[best_by]}, of equals the last",
        ]
    )


def warn_of_few_prompts(num_prompts: int, best_by: str) -> str | None:
    """Say that a choice by so few prompts is left to chance; None where they are enough or none."""
    if num_prompts == 0 or num_prompts >= _FEW_PROMPTS:
        return None
    rests = "prompt alone" if num_prompts == 1 else "prompts alone"
    return (
        f"`best` will rest on {num_prompts} held-out {rests}, so {_WORDS[best_by]} may pick a "
        f"checkpoint by chance; hold out {_FEW_PROMPTS} or more (data.validation_fraction, or more "
        "chats)"
    )


def warn_of_rising_loss(numbers: Iterable[Mapping[str, Any]]) -> str | None:
    """Say that training made the drafter worse; None where the loss did not end far above.

    Args:
        numbers: the run's metrics.
    """
    losses = [
        (row["step"], row["train/loss"]) for row in numbers if row.get("train/loss") is not None
    ]
    if not losses:
        return None
    (_, first), (step, last) = losses[0], losses[-1]
    if last <= _RISEN_TIMES * first or last - first <= _RISEN_BY:
        return None
    return (
        f"the training loss rose from {first:.4g} to {last:.4g} at step {step}: this drafter is "
        "worse than it began; lower optim.lr, or set optim.clip_norm"
    )


_FEW_PROMPTS = 8
# far above what chance does to a mean over some steps
_RISEN_TIMES = 2.0
_RISEN_BY = 1.0
_WORDS = {"loss": "loss", "tau": "tau", "tokens_per_s": "tokens/s"}


def _place_of_largest(column: list[float | None]) -> int | None:
    places = [place for place, value in enumerate(column) if value is not None]
    # the last of equals, as the trainer chooses: it has learned more
    return max(places, key=lambda place: (column[place], place), default=None)


def _cell(value: float | None, form: str, *, is_best: bool) -> str:
    text = "-" if value is None else format(value, form)
    return text + ("*" if is_best else " ")
