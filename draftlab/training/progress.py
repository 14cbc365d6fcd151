"""What a person sees of a training: a bar with the time left, or plain lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

log = logging.getLogger(__name__)


class ProgressDisplay:
    """A bar when standard output is a terminal, else one log line a reading."""

    def __init__(self, *, done: int, total: int, is_shown: bool) -> None:
        """Prepare; `running` shows it.

        Args:
            done: optimizer steps already done.
            total: optimizer steps of the whole training.
            is_shown: False on every process but the first.
        """
        self._total = total
        self._is_shown = is_shown
        self._bar: Progress | None = None
        if is_shown and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._task = self._bar.add_task("training", total=total, completed=done, numbers="")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Show the bar."""
        if self._bar is None:
            yield
            return
        with self._bar:
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to someone else, such as a probe with its own bar."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def advance(self) -> None:
        """Count one optimizer step."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def set_total(self, total: int) -> None:
        """Count to another number of optimizer steps."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def show(self, step: int, numbers: dict[str, float]) -> None:
        """Show the newest numbers."""
        if not self._is_shown:
            return
        loss, speed = numbers["train/loss"], numbers["train/tokens_per_s"]
        if self._bar is not None:
            text = f"loss {loss:.3f}  {speed:.0f} tok/s"
            self._bar.update(self._task, numbers=text)
            return
        left = (self._total - step) * numbers["time/step_s"]
        log.info(
            "step %d/%d  loss %.4f  lr %.2e  %.0f tok/s  about %s left",
            step,
            self._total,
            loss,
            numbers["train/lr"],
            speed,
            _duration(left),
        )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
