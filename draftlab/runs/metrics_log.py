"""metrics.jsonl: the numbers of a run, one JSON object a line, safe against a crash."""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftlab.errors import CheckpointError
from draftlab.files import naming_refusals


class MetricsLog:
    """Appends numbers to a file; a line that a crash tore is dropped on reopening.

    A resumed run repeats steps after its last checkpoint, or ends before some of them, where a time
    limit decides. Readers get none that were taken back, so repeated steps count once.
    """

    def __init__(self, path: Path) -> None:
        """Open for appending, and repair the end."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._start = time.monotonic()
        self._before = max((float(row["time_s"]) for row in _rows(path)), default=0.0)

    def log(self, step: int, split: str, **numbers: int | float) -> None:
        """Append one line.

        Args:
            step: optimizer steps done.
            split: such as "train" or "validation".
            numbers: key -> number, such as **{"train/loss": 1.5}; NaN and infinity become null.
        """
        row: dict[str, Any] = {"step": step, "time_s": round(self._time_s(), 3), "split": split}
        for key, value in numbers.items():
            row[key] = value if math.isfinite(value) else None
        with naming_refusals(self.path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Force the lines to disk and close."""
        if not self._file.closed:
            with naming_refusals(self.path):
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()

    def _time_s(self) -> float:
        return self._before + time.monotonic() - self._start


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics file in order of time, without those that a resume took back.

    Of a repeated (step, split) that is all but the last; of steps after which the run went on from
    an earlier one, all. A torn last line is left out. Keys: step, time_s (seconds of work, over all
    resumes), split, and the numbers.

    Raises:
        CheckpointError: a line before the last is no JSON object.
    """
    if not path.is_file():
        return []
    last: dict[tuple[int, str], dict[str, Any]] = {}
    newest = 0
    for row in _rows(path):
        key = (row["step"], row["split"])
        if row["step"] < newest:
            last = {other: kept for other, kept in last.items() if other[0] <= row["step"]}
        newest = row["step"]
        last.pop(key, None)
        last[key] = row
    return list(last.values())


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    complete = path.read_bytes().rpartition(b"\n")[0]
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not {"step", "split", "time_s"} <= row.keys():
            raise CheckpointError(
                f"{path}, line {number}: not a metrics line, the file was edited or damaged: "
                f"{line[:60].decode(errors='replace')!r}"
            )
        yield row


def _drop_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep < len(data):
        os.truncate(path, keep)
