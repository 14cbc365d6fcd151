"""The folder of one run: typed paths, and the rules about writing into it.

In: where outputs go and a name. Out: `RunDir`. Read first: RunDir, create_run, open_run.
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from draftlab.errors import CheckpointError
from draftlab.files import write_atomic

PROVENANCE = "provenance.json"  # of a run, and of an evaluation in its own folder
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # no look-alikes: people type these


def write_json(path: Path, data: Any) -> None:
    """Write plain data as readable JSON, atomically. Refuses NaN and infinity (ValueError)."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, text + "\n")


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Making the object touches no disk.

    Attributes:
        path: the run's folder.
    """

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved, complete config.yaml: the run can be started again from it."""
        return self.path / "config.yaml"

    @property
    def provenance_path(self) -> Path:
        """Command, code, versions and machine."""
        return self.path / PROVENANCE

    @property
    def metrics_path(self) -> Path:
        """Numbers of the run, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """What the run said."""
        return self.path / "train.log"

    @property
    def checkpoints_path(self) -> Path:
        """Folder of checkpoints and of the text files `latest` and `best`."""
        return self.path / "checkpoints"

    @property
    def report_html_path(self) -> Path:
        """The report as one file for a browser."""
        return self.path / "report.html"

    @property
    def report_md_path(self) -> Path:
        """The report as text."""
        return self.path / "report.md"

    def checkpoint_path(self, step: int) -> Path:
        """Give the folder of the checkpoint after `step` optimizer steps."""
        return self.checkpoints_path / f"step-{step:06d}"

    def eval_path(self, suite: str) -> Path:
        """Give the folder of an evaluation's results."""
        return self.path / "eval" / suite

    def export_path(self, form: str) -> Path:
        """Give the folder of an export, such as "vllm"."""
        return self.path / "export" / form

    def write_config(self, data: Mapping[str, Any]) -> None:
        """Write config.yaml, keys in the order given."""
        text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
        write_atomic(self.config_path, text)

    def read_config(self) -> dict[str, Any]:
        """Read config.yaml as plain data.

        Raises:
            CheckpointError: it is missing or not a mapping.
        """
        try:
            data = yaml.safe_load(self.config_path.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise CheckpointError(f"cannot read {self.config_path}: {error}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.config_path} holds no settings; the run is damaged")
        return data

    def point(self, name: str, step: int) -> None:
        """Let the pointer `latest` or `best` name the checkpoint of a step."""
        write_atomic(self.checkpoints_path / name, self.checkpoint_path(step).name + "\n")

    def pointed(self, name: str) -> Path | None:
        """Follow a pointer to its checkpoint folder; None when it was never set.

        Raises:
            CheckpointError: the folder it names is gone.
        """
        pointer = self.checkpoints_path / name
        if not pointer.is_file():
            return None
        folder = self.checkpoints_path / pointer.read_text(encoding="utf-8").strip()
        if not folder.is_dir():
            raise CheckpointError(f"{pointer} names {folder.name}, which is not there any more")
        return folder

    @property
    def is_finished(self) -> bool:
        """Whether the run said that it is done."""
        return (self.path / "finished").is_file()

    def mark_finished(self) -> None:
        """Say that nothing is left to do; an equal command then starts a new run."""
        write_atomic(self.path / "finished", datetime.now().astimezone().isoformat() + "\n")

    @property
    def is_running(self) -> bool:
        """Whether a living process holds the run. Looking writes nothing."""
        path = self.path / ".lock"
        if not path.is_file():
            return False
        with path.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other processes from writing into the run; a killed process lets go by itself.

        Raises:
            CheckpointError: another process holds it, or its folder cannot be written.
        """
        try:
            opened = (self.path / ".lock").open("a")
        except OSError as error:
            raise CheckpointError(
                f"cannot write into run {self.path}: {error.strerror}; make it writable, or choose "
                "another folder with paths.outputs=FOLDER"
            ) from None
        with opened as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"run {self.path} is being written by another process; wait for it, or stop it"
                ) from None
            yield


def new_run_id(now: datetime | None = None) -> str:
    """Make an id from the time and 4 random characters, so that two jobs of a second differ."""
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{''.join(secrets.choice(_ALPHABET) for _ in range(4))}"


def create_run(outputs: Path, name: str, *, run_id: str | None = None) -> RunDir:
    """Make the folder outputs/name/id.

    Args:
        outputs: folder of all runs.
        name: recipe, or "adhoc".
        run_id: a fixed id; a new one when None.

    Raises:
        CheckpointError: the folder exists: a run is never overwritten.
    """
    path = outputs / name / (run_id or new_run_id())
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise CheckpointError(
            f"run folder {path} exists and is never overwritten; choose another outputs folder "
            "(paths.outputs=...) or continue that run with resume=RUN"
        ) from None
    return RunDir(path)


def open_run(path: str | Path) -> RunDir:
    """Open an existing run for reading.

    Raises:
        CheckpointError: no such folder, or a folder that is no run.
    """
    run = RunDir(Path(path).expanduser())
    if not run.path.is_dir():
        raise CheckpointError(f"no run {run.path}; `draftlab runs` lists the runs")
    if not run.config_path.is_file():
        raise CheckpointError(
            f"{run.path} is no run: it has no config.yaml; `draftlab runs` lists the runs"
        )
    return run


def list_runs(outputs: Path) -> list[RunDir]:
    """Find the runs below a folder, oldest first."""
    found = []
    for folder, below, files in os.walk(outputs):
        if "config.yaml" in files:
            found.append(RunDir(Path(folder)))
            below.clear()  # a run holds no runs
    return sorted(found, key=lambda run: (run.path.name, str(run.path)))
