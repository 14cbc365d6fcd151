import pytest

from draftlab.cli import progress
from draftlab.cli.progress import StageTicker, Ticker


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)


def test_the_last_line_is_printed_once_though_it_was_due_anyway(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    with Ticker("answers", 2) as ticker:
        ticker.advance()
        ticker.advance(note="9 tokens/s")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == ["answers: 1/2", "answers: 2/2"]
    assert lines[-1].endswith("9 tokens/s")


def test_short_work_is_one_line(capsys):
    with Ticker("answers", 3) as ticker:
        for _ in range(3):
            ticker.advance()
    assert capsys.readouterr().out.count("answers: 3/3") == 1


def test_work_that_failed_says_nothing_of_its_end(capsys):
    def work():
        with Ticker("answers", 3):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    assert capsys.readouterr().out == ""


def test_a_new_stage_ends_the_line_of_the_one_before(capsys):
    show = StageTicker()
    show("tau", 2, 2)
    show("audit", 1, 1)
    show.close()
    names = [line.partition(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["tau: 2/2", "audit: 1/1"]


def test_work_that_is_given_a_time_is_counted_in_seconds(capsys):
    with Ticker("answers", 9, unit=" s") as ticker:
        ticker.update(4, note="7 answers")
    assert capsys.readouterr().out == "answers: 4/9 s, 7 answers\n"
