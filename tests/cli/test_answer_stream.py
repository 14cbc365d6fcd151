"""Answers are shown whole, in order and in colour, whatever order tokens come in."""

import io
import random

import pytest
from rich.console import Console

from draftlab.cli.answer_stream import (
    AnswerStream,
    LiveScreen,
    Pace,
    PlainScreen,
    make_heading,
    open_screen,
)
from draftlab.decoding.records import Generation
from draftlab.decoding.stops import StopStrings
from draftlab.targets.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


class Recording:
    """A screen that keeps what it is given."""

    def __init__(self):
        self.writes, self.status, self.is_closed = [], "", False

    def head(self, title, *, is_first):
        self.write(make_heading(title, is_first=is_first), "bold")

    def write(self, text, style):
        if text:
            self.writes.append((text, style))

    def tell(self, status):
        self.status = status

    def close(self):
        self.is_closed = True

    @property
    def text(self):
        return "".join(text for text, _ in self.writes)


def finished(index, tokens):
    return Generation(index, (1,), tuple(tokens), "eos", (), 0.0, 0.0)


def show(tokenizer, texts, *, strings=(), seed=0):
    """Give the tokens of several answers in runs of any size, rows taking turns by chance."""
    chance, screen = random.Random(seed), Recording()
    stops = StopStrings(tokenizer, strings)
    left = {i: tokenizer.encode(text) for i, text in enumerate(texts)}
    with AnswerStream(stops, [f"question {i}" for i in left], screen) as shown:
        while left:
            index = chance.choice(list(left))
            size = chance.randrange(1, 6)
            run, left[index] = left[index][:size], left[index][size:]
            shown.on_tokens(index, run, len(run) - 1)
            if not left[index]:
                shown.on_finish(finished(index, tokenizer.encode(texts[index])))
                del left[index]
    return screen


@pytest.mark.parametrize("seed", range(5))
def test_several_answers_stand_in_the_order_of_their_prompts(seed, tokenizer):
    screen = show(tokenizer, ["eins é", "zwei 次", "drei"], seed=seed)
    expected = "> question 0\neins é\n\n> question 1\nzwei 次\n\n> question 2\ndrei\n"
    assert screen.text == expected
    assert screen.is_closed


@pytest.mark.parametrize("seed", range(3))
def test_one_answer_has_no_heading(seed, tokenizer):
    assert show(tokenizer, ["héllo"], seed=seed).text == "héllo\n"


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_string_is_not_shown_not_even_its_beginning(seed, tokenizer):
    # what comes behind a stop string belongs to no answer
    assert show(tokenizer, ["a ENough of thisENDmore"], strings=["END"], seed=seed).text == (
        "a ENough of this\n"
    )


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(tokenizer):
    assert show(tokenizer, ["to the EN"], strings=["END"]).text == "to the EN\n"


def test_accepted_draft_tokens_are_coloured_and_others_are_not(tokenizer):
    screen = Recording()
    with AnswerStream(StopStrings(tokenizer, []), ["?"], screen) as shown:
        shown.on_tokens(0, tokenizer.encode("abc"), 2)
        shown.on_tokens(0, tokenizer.encode("é"), 1)  # its second byte is the target's own
    assert screen.writes == [("a", "green"), ("b", "green"), ("c", ""), ("é", "")]


def test_half_a_character_is_shown_as_such_at_the_end(tokenizer):
    screen = Recording()
    tokens = tokenizer.encode("a次")[:-1]
    with AnswerStream(StopStrings(tokenizer, []), ["?"], screen) as shown:
        shown.on_tokens(0, tokens, 0)
        assert screen.text == "a"
        shown.on_finish(finished(0, tokens))
    assert screen.text == "a\ufffd\n"


def test_the_status_counts_verify_steps_and_leaves_prompts_out(tokenizer):
    times = iter([10.0, 10.0, 12.0, 12.0, 14.0])
    screen = Recording()
    pace = Pace(now=lambda: next(times))
    with AnswerStream(StopStrings(tokenizer, []), ["?"], screen, pace) as shown:
        shown.on_tokens(0, [65], 0)
        assert screen.status == "reading"
        shown.on_tokens(0, [66, 67, 68], 2)
        assert screen.status == "tau 3.00, 1.5 tokens/s, 3 tokens"


def test_a_long_title_is_one_short_line(tokenizer):
    screen = Recording()
    with AnswerStream(StopStrings(tokenizer, []), ["two\nlines " * 30, "?"], screen):
        pass
    (heading,) = screen.text.splitlines()
    assert len(heading) == 74
    assert heading.endswith("...")


def terminal(**options):
    return Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False, **options)


def test_a_terminal_keeps_text_and_colour_and_loses_the_status():
    console = terminal(color_system="standard")
    screen = LiveScreen(console)
    screen.write("first ", "green")
    screen.write("line\nse", "")
    screen.tell("tau 2.00")
    screen.write("cond [bold] \x1b[31m", "")
    screen.close()
    said = console.file.getvalue()
    assert "\x1b[32mfirst \x1b[0mline" in said
    last = said[said.rindex("\x1b[2K") :]  # what follows the last line that was wiped
    assert "second [bold] ␛[31m\n" in last  # no markup, and nothing a terminal would obey
    assert "tau" not in last
    assert said.count("line") == 1


def test_a_line_longer_than_the_terminal_is_printed_whole_once_it_is_full():
    console = terminal(height=6, no_color=True)
    screen = LiveScreen(console)
    words = [f"word{i}" for i in range(100)]
    for word in words:
        screen.write(f"{word} ", "")
    assert len(console.render_lines(screen._render())) <= 6
    screen.close()
    said = console.file.getvalue()
    assert " ".join(words) in said[said.rindex("\x1b[2K") :].replace("\n", "")


def test_no_color_leaves_the_text(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = terminal()
    screen = LiveScreen(console)
    screen.write("accepted", "green")
    screen.close()
    assert "\x1b[32m" not in console.file.getvalue()
    assert "accepted" in console.file.getvalue()


def test_a_pipe_gets_answers_alone_with_a_blank_line_between(capsys):
    screen = open_screen()
    assert isinstance(screen, PlainScreen)
    screen.head("What?", is_first=True)
    screen.write("a", "green")
    screen.tell("tau 1.00")
    screen.write("次\n", "")
    screen.head("And then?", is_first=False)
    screen.write("b\n", "")
    screen.close()
    assert capsys.readouterr().out == "a次\n\nb\n"
