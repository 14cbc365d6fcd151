"""Checkpoints of a training: whole or absent, whenever the process dies.

    checkpoints/step-000500/{drafter files, state/tensors.safetensors, state/state.json}
    checkpoints/latest   checkpoints/best     text: the name of a folder

A folder is written under a temporary name, forced to disk and renamed; the pointers follow.
Nothing is pickled.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftlab.errors import CheckpointError
from draftlab.files import force_to_disk, force_tree_to_disk, naming_refusals, write_atomic
from draftlab.shapes import Tensor

_WRITING = ".writing-"
_DROPPING = ".dropping-"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is.

    Attributes:
        step: optimizer steps done.
        epoch: pass over the data of the next step, 0...
        position: optimizer steps of that pass already done.
        total_steps: optimizer steps of the whole training; the schedule hangs on it.
        best_step: step of the best probe so far, or None.
        best_tau: its acceptance length, or None.
        best_by: what made it the best, such as "tau".
        best_score: that number of its probe.
        idle_probes: probes since then.
        spent_s: of a time limit, seconds used up; None without a limit, and in older checkpoints.
        counted_s: of them, each optimizer step since the last look at the pace.
        looks: the plan's looks so far (plan.py).
    """

    step: int
    epoch: int
    position: int
    total_steps: int
    best_step: int | None
    best_tau: float | None
    best_by: str | None = None
    best_score: float | None = None
    idle_probes: int = 0
    spent_s: float | None = None
    counted_s: tuple[float, ...] = ()
    looks: tuple[tuple[int, int], ...] = ()


class CheckpointFolder:
    """The checkpoints of one run. Only the main process writes."""

    def __init__(self, root: Path) -> None:
        """Name the folder; it is made when first written to."""
        self.root = root

    def latest(self) -> Path | None:
        """Give the newest whole checkpoint, or None."""
        return self._pointed("latest")

    def best(self) -> Path | None:
        """Give the checkpoint with the best probe, or None."""
        return self._pointed("best")

    def commit(self, step: int, write: Callable[[Path], None], *, is_best: bool) -> Path:
        """Write one checkpoint as a whole, then point to it.

        Args:
            step: optimizer steps done.
            write: fills the folder it is given.
            is_best: this is the best so far.
        """
        name = f"step-{step:06d}"
        temporary, final = self.root / f"{_WRITING}{name}", self.root / name
        with naming_refusals(final):
            self.root.mkdir(parents=True, exist_ok=True)
            _remove(temporary)
            temporary.mkdir()
            write(temporary)
            force_tree_to_disk(temporary)
        if final.exists():  # committed, but the process died before `latest` named it
            self._drop(final)
        os.replace(temporary, final)
        force_to_disk(self.root)
        write_atomic(self.root / "latest", name)
        if is_best:
            self.name_best(step)
        return final

    def name_best(self, step: int) -> None:
        """Point `best` to a checkpoint, if that is still there and not named already."""
        name = f"step-{step:06d}"
        pointer = self.root / "best"
        is_named = pointer.is_file() and pointer.read_text(encoding="utf-8").strip() == name
        if not is_named and (self.root / name).is_dir():
            write_atomic(pointer, name)

    def rotate(self, keep: int) -> None:
        """Keep the newest checkpoints and the best one, and clear what a dead process left."""
        for leftover in self.root.glob(".*-step-*"):
            _remove(leftover)
        names = sorted((path.name for path in self.root.glob("step-*")), key=_step_of)
        kept = {path.name for path in (self.latest(), self.best()) if path is not None}
        for name in names[:-keep]:
            if name not in kept:
                self._drop(self.root / name)

    def _drop(self, folder: Path) -> None:
        # renamed first: a folder that is half gone must not look like a checkpoint
        doomed = folder.with_name(f"{_DROPPING}{folder.name}")
        _remove(doomed)
        os.replace(folder, doomed)
        _remove(doomed)

    def _pointed(self, pointer: str) -> Path | None:
        path = self.root / pointer
        if not path.is_file():
            return None
        folder = self.root / path.read_text(encoding="utf-8").strip()
        if not folder.is_dir():
            raise CheckpointError(
                f"{path} names {folder.name}, which does not exist; write the name of one of the "
                f"step-* folders beside it into {path}, or delete {path}"
            )
        return folder


def write_state(folder: Path, progress: Progress, tensors: dict[str, Tensor]) -> None:
    """Write the state of a training into a checkpoint that is being made."""
    state = folder / "state"
    state.mkdir()
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(plain, state / "tensors.safetensors")
    (state / "state.json").write_text(json.dumps(asdict(progress), indent=2), encoding="utf-8")


def read_state(folder: Path) -> tuple[Progress, dict[str, Tensor]]:
    """Read what `write_state` wrote.

    Raises:
        CheckpointError: the folder is no checkpoint of a training.
    """
    progress = read_progress(folder)
    try:
        return progress, load_file(folder / "state" / "tensors.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _no_state(folder, error) from None


def read_progress(folder: Path) -> Progress:
    """Read how far a training was.

    Raises:
        CheckpointError: the folder is no checkpoint of a training.
    """
    try:
        plain = json.loads((folder / "state" / "state.json").read_text(encoding="utf-8"))
        # JSON has lists only
        plain["counted_s"] = tuple(map(float, plain.get("counted_s", ())))
        plain["looks"] = tuple((int(step), int(total)) for step, total in plain.get("looks", ()))
        return Progress(**plain)
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise _no_state(folder, error) from None


def _no_state(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds no training state that can be resumed ({error}); expected "
        "state/state.json and state/tensors.safetensors; pass a folder checkpoints/step-*"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file of a run.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); start the training in a new folder"
        ) from None


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
