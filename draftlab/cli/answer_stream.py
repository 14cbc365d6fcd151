"""Answers on a screen while they are written: whole characters, accepted draft tokens in colour.

In: tokens as the decoder gives them, of several prompts at once perhaps. Out: the answers one after
the other, in order. In a terminal each stands below its question, and a line below them tells how
it goes; elsewhere there are answers alone.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, runtime_checkable

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from draftlab.decoding.records import Generation
from draftlab.decoding.stops import AnswerText, StopStrings

ACCEPTED = "green"
# what a terminal would obey, shown as a sign instead
_SIGNS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}
_TITLE_WIDTH = 72
_REFRESHES_PER_SECOND = 8


@runtime_checkable
class Screen(Protocol):
    """Where text goes."""

    def head(self, title: str, *, is_first: bool) -> None:
        """Begin the answer to one of several questions."""
        ...

    def write(self, text: str, style: str) -> None:
        """Put text behind what is there."""
        ...

    def tell(self, status: str) -> None:
        """Say how it goes, if there is a place for that."""
        ...

    def close(self) -> None:
        """Leave the text, and nothing else."""
        ...


class PlainScreen:
    """A pipe, a file, a terminal that can do nothing: answers alone."""

    def head(self, title: str, *, is_first: bool) -> None:
        """Print a blank line between two answers, and no question."""
        if not is_first:
            print()

    def write(self, text: str, style: str) -> None:
        """Print text as it is."""
        print(text, end="", flush=True)

    def tell(self, status: str) -> None:
        """Say nothing: the summary does."""

    def close(self) -> None:
        """Nothing is left to do."""


class LiveScreen:
    """A terminal: the line that is being written, and the status below it."""

    def __init__(self, console: Console) -> None:
        """Take over the lower end of a terminal."""
        self._console = console
        self._line = Text()
        self._status = ""
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )
        self._live.start()

    def head(self, title: str, *, is_first: bool) -> None:
        """Show the question, on one line."""
        self.write(make_heading(title, is_first=is_first), "bold")

    def write(self, text: str, style: str) -> None:
        """Append text; lines that are full are printed for good."""
        *full, last = text.translate(_SIGNS).split("\n")
        for piece in full:
            self._line.append(piece, style)
            self._print_line()
        self._line.append(last, style)

    def tell(self, status: str) -> None:
        """Change the line below the text."""
        self._status = status

    def close(self) -> None:
        """Take the status away, and print what stood in the last line."""
        self._live.stop()
        if self._line:
            self._print_line()

    def _print_line(self) -> None:
        full, self._line = self._line, Text()
        self._live.refresh()  # printing draws once more what is below: the line must have left it
        self._console.print(full, soft_wrap=True)

    def _render(self) -> Group:
        # what scrolls off a screen cannot be wiped, so a long line shows its end until it is full
        rows = self._line.wrap(self._console, self._console.width)
        shown = Text("\n").join(rows[-max(1, self._console.height - 2) :])
        return Group(shown, Text(self._status, style="dim"))


def open_screen() -> Screen:
    """Choose a screen for stdout; NO_COLOR and a dumb terminal are respected."""
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(console)
    return PlainScreen()


@dataclass(slots=True)
class Pace:
    """How it goes so far, over all answers; the first token of each belongs to its prompt.

    Attributes:
        now: clock, seconds.
        steps: verify steps.
        emitted: tokens they gave.
        began: clock reading at the first token of all.
    """

    now: Callable[[], float] = time.monotonic
    steps: int = 0
    emitted: int = 0
    began: float | None = None

    def note(self, num_tokens: int, *, is_first: bool) -> None:
        """Take in what came out of one pass for one answer."""
        if self.began is None:
            self.began = self.now()
        if not is_first:
            self.steps += 1
            self.emitted += num_tokens

    def __str__(self) -> str:
        """Say it in one line."""
        spent = 0.0 if self.began is None else self.now() - self.began
        if not self.steps or spent <= 0:
            return "reading"
        return (
            f"tau {self.emitted / self.steps:.2f}, {self.emitted / spent:.1f} tokens/s, "
            f"{self.emitted} tokens"
        )


@dataclass(slots=True)
class _Written:
    """One answer: its text, and the pieces of it that were not shown yet."""

    text: AnswerText
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    num_shown: int = 0
    num_tokens: int = 0

    def take(self, until: int) -> list[tuple[str, bool]]:
        """Take pieces up to a place in the text."""
        taken = []
        while self.pieces and self.num_shown < until:
            piece, is_accepted = self.pieces.pop(0)
            room = until - self.num_shown
            if len(piece) > room:
                self.pieces.insert(0, (piece[room:], is_accepted))
                piece = piece[:room]
            self.num_shown += len(piece)
            taken.append((piece, is_accepted))
        return taken


class AnswerStream:
    """Shows answers in the order of their prompts, whatever order they are written in.

    `with AnswerStream(stops, titles, screen) as shown:` around a decoder's `generate` that is given
    `shown.on_tokens` and `shown.on_finish`.
    """

    def __init__(
        self, stops: StopStrings, titles: Sequence[str], screen: Screen, pace: Pace | None = None
    ) -> None:
        """Start with the first prompt.

        Args:
            stops: makes text of tokens, and knows where answers end.
            titles: what each prompt asks; a terminal shows them when there are several.
            screen: where text goes.
            pace: what the status tells.
        """
        self._stops = stops
        self._titles = titles
        self._screen = screen
        self._pace = pace or Pace()
        self._answers = [_Written(stops.open()) for _ in titles]
        self._done: set[int] = set()
        self._current = 0

    def __enter__(self) -> "AnswerStream":
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._screen.close()

    def on_tokens(self, index: int, tokens: list[int], num_accepted: int) -> None:
        """Take in tokens of one answer, the accepted draft tokens first."""
        answer = self._answers[index]
        self._pace.note(len(tokens), is_first=answer.num_tokens == 0)
        answer.num_tokens += len(tokens)
        for place, token in enumerate(tokens):
            if answer.text.stop is None:
                before = len(answer.text.text)
                self._stops.feed(answer.text, [token])
                answer.pieces.append((answer.text.text[before:], place < num_accepted))
        if index == self._current:
            self._show(len(self._stops.settled(answer.text)))
        self._screen.tell(str(self._pace))

    def on_finish(self, generation: Generation) -> None:
        """Show the rest of an answer, and go on with the next one that is not done."""
        self._done.add(generation.prompt_index)
        while self._current in self._done:
            answer = self._answers[self._current]
            before = len(answer.text.text)
            text = self._stops.close(answer.text)
            answer.pieces.append((text[before:], False))
            self._show(len(text))
            self._screen.write("\n", "")
            self._current += 1
            self._begin()

    def _begin(self) -> None:
        if self._current == len(self._titles):
            return
        if len(self._titles) > 1:
            self._screen.head(self._titles[self._current], is_first=self._current == 0)
        self._show(len(self._stops.settled(self._answers[self._current].text)))

    def _show(self, until: int) -> None:
        for piece, is_accepted in self._answers[self._current].take(until):
            self._screen.write(piece, ACCEPTED if is_accepted else "")


def make_heading(title: str, *, is_first: bool) -> str:
    """Make the line above an answer, with a blank one before it where another answer ends."""
    line = " ".join(title.split())
    if len(line) > _TITLE_WIDTH:
        line = f"{line[: _TITLE_WIDTH - 3]}..."
    return f"{'' if is_first else chr(10)}> {line}\n"
