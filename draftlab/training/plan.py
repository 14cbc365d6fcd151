"""What a training set out to do, fixed once and kept in checkpoints/plan.json.

A resumed training must be the same training: same data, same optimizer, same limits. A time limit
is turned into a number of steps (time_limit.py); where a later look at the pace changes it, the
plan keeps from which step on: that is the schedule the steps had. A checkpoint keeps number and
looks as well, and a run with a time limit goes on with those: plan.json may be ahead of it.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftlab.errors import CheckpointError
from draftlab.files import write_atomic
from draftlab.training.checkpoints import read_json
from draftlab.training.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Everything that must be equal for a resumed training to be exact.

    Attributes:
        drafter: the drafter's settings as plain data.
        target_checksum: fingerprint of the target's weights.
        optim: OptimSettings as plain data.
        limits: max_steps, max_epochs, max_minutes and precision, as plain data.
        rows_checksum: fingerprint of the packed data.
        seed: the run's seed.
        step_rows: rows of an optimizer step over all processes and batches; how they are cut into
            processes and batches may change.
        total_steps: optimizer steps.
        adapter: what is trained beside which base, in words; None without adapters.
        looks: (step, total until then) of every look at the pace that changed the total: later
            steps follow the next one, or `total_steps` where there is none.
    """

    drafter: dict[str, Any]
    target_checksum: str
    optim: dict[str, Any]
    limits: dict[str, Any]
    rows_checksum: str
    seed: int
    step_rows: int
    total_steps: int
    adapter: str | None = None
    looks: tuple[tuple[int, int], ...] = ()

    def total_at(self, step: int) -> int:
        """Give the number of steps that was planned when a step was taken: its schedule's."""
        return next((total for last, total in self.looks if step <= last), self.total_steps)

    def look(self, step: int, total_steps: int) -> "TrainingPlan":
        """Change the number of steps for all after `step`."""
        looks = (*self.looks, (step, self.total_steps))
        return replace(self, total_steps=total_steps, looks=looks)

    def write(self, folder: Path) -> None:
        """Write plan.json as a whole."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "plan.json", json.dumps(asdict(self), indent=2))

    def resume(self, folder: Path) -> "TrainingPlan":
        """Give the plan this training began with, or this one when none was written yet.

        Raises:
            CheckpointError: the training began with other data or settings; names each.
        """
        path = folder / "plan.json"
        if not path.is_file():
            return self
        began = _flat(read_json(path))
        now = _flat(json.loads(json.dumps(asdict(self))))  # so that tuples and lists compare equal
        differences = [
            f"{key}: began with {_short(began.get(key))}, now {_short(value)}"
            for key, value in now.items()
            if key not in ("total_steps", "looks") and began.get(key) != value
        ]
        if differences:
            raise CheckpointError(
                f"{path} was written by a training that differs:\n  "
                + "\n  ".join(differences)
                + "\nresume with the settings and data it began with, or train in a new folder: "
                "resume=never (init=DRAFTER goes on from its weights)"
            )
        looks = tuple((int(step), int(total)) for step, total in began.get("looks", ()))
        return replace(self, total_steps=int(began["total_steps"]), looks=looks)


def steps_within_limits(settings: TrainSettings, steps_per_epoch: int) -> int | None:
    """Compute the optimizer steps that max_steps and max_epochs allow; None: no such limit."""
    limits = []
    if settings.max_steps is not None:
        limits.append(settings.max_steps)
    if settings.max_epochs is not None:
        limits.append(max(1, math.ceil(settings.max_epochs * steps_per_epoch)))
    return min(limits, default=None)


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            out |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            out[key] = value
    return out


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."
