import logging
import sys

from draftlab.training.progress import ProgressDisplay

NUMBERS = {"train/loss": 1.25, "train/tokens_per_s": 900.0, "time/step_s": 0.5, "train/lr": 0.003}


def test_without_a_terminal_each_reading_is_one_line_with_the_time_left(caplog):
    caplog.set_level(logging.INFO)
    display = ProgressDisplay(done=0, total=200, is_shown=True)
    with display.running(), display.paused():
        display.advance()
    display.show(50, NUMBERS)
    assert caplog.messages == ["step 50/200  loss 1.2500  lr 3.00e-03  900 tok/s  about 1:15 left"]


def test_other_processes_say_nothing(caplog):
    caplog.set_level(logging.INFO)
    ProgressDisplay(done=0, total=200, is_shown=False).show(50, NUMBERS)
    assert caplog.messages == []


def test_on_a_terminal_there_is_a_bar_that_can_step_aside(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    display = ProgressDisplay(done=2, total=5, is_shown=True)
    with display.running():
        display.advance()
        display.show(3, NUMBERS)
        with display.paused():
            print("a probe")
        display.advance()
    shown = capsys.readouterr().out
    assert "a probe" in shown
    assert "4/5" in shown
    assert "loss 1.250" in shown
