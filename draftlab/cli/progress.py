"""Progress of long work: a bar with an ETA in a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_LINE_EVERY_S = 10.0


class Ticker:
    """Counts units of one piece of work and shows how far it is.

    `with Ticker("answers", total) as tick: tick.advance(1, note="250 tok/s")`.
    """

    def __init__(self, what: str, total: int, *, unit: str = "") -> None:
        """Name the work, its size, and the unit it is counted in where that is no piece of it."""
        self.what = what
        self.total = total
        self._unit = unit
        self.done = 0
        self._note = ""
        self._began = self._last_line = time.monotonic()
        self._last_done = -1  # units the last line told of
        self._is_terminal = sys.stdout.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(file=sys.stdout),
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task(what, total=total, note="")

    def __enter__(self) -> "Ticker":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        if not self._is_terminal and kind is None and self._last_done != self.done:
            self._print_line()

    def advance(self, units: int = 1, *, note: str | None = None) -> None:
        """Count units done; `note` stays until it is replaced."""
        self.update(self.done + units, note=note)

    def update(self, done: int, *, note: str | None = None) -> None:
        """Say how many units are done in all."""
        self.done = done
        self._note = note if note is not None else self._note
        self._bar.update(self._task, completed=done, note=self._note)
        now = time.monotonic()
        if not self._is_terminal and now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            self._print_line()

    def _print_line(self) -> None:
        self._last_done = self.done
        spent = time.monotonic() - self._began
        left = spent / self.done * (self.total - self.done) if self.done else None
        eta = f", {left:.0f} s left" if left and left >= 1 else ""
        note = f", {self._note}" if self._note else ""
        done = f"{self.done}/{self.total}{self._unit}"
        taken = "" if self._unit == " s" else f", {spent:.0f} s"
        print(f"{self.what}: {done}{taken}{eta}{note}", flush=True)


class StageTicker:
    """Shows work that names its own stages, such as an evaluation: (what, done, total)."""

    def __init__(self) -> None:
        self._ticker: Ticker | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Take in progress; a new name ends the bar before it."""
        if self._ticker is None or self._ticker.what != what:
            self.close()
            self._ticker = Ticker(what, total)
            self._ticker.__enter__()
        self._ticker.update(done)

    def close(self) -> None:
        """End the last bar."""
        if self._ticker is not None:
            self._ticker.__exit__(None, None, None)
            self._ticker = None
