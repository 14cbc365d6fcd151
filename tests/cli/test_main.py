import errno
import subprocess
import sys
import types
from pathlib import Path

import pytest

from draftlab.cli import main as main_module
from draftlab.cli.main import COMMANDS, main
from draftlab.errors import ConfigError, DraftlabError, LosslessViolation


@pytest.fixture
def command(monkeypatch):
    """Put a command of this test's own in the place of `doctor`."""

    def install(run):
        module = types.ModuleType("draftlab.cli.doctor")
        vars(module).update(HELP="usage: draftlab doctor\n", run=run)
        monkeypatch.setitem(sys.modules, "draftlab.cli.doctor", module)

    return install


def fail_with(error):
    def run(args):
        raise error

    return run


def test_help_lists_every_command_with_its_line(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, what in COMMANDS.items():
        assert f"  {name} " in out
        assert what in out


def test_no_words_show_the_help(capsys):
    assert main([]) == 0
    assert "usage: draftlab COMMAND" in capsys.readouterr().out


def test_an_unknown_command_names_near_ones(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'; did you mean train" in capsys.readouterr().err


def test_a_command_gets_its_words_and_gives_the_exit_code(command):
    seen = []
    command(lambda args: seen.extend(args) or 4)
    assert main(["doctor", "a=b", "c d"]) == 4
    assert seen == ["a=b", "c d"]


def test_help_of_a_command_shows_its_text_and_runs_nothing(command, capsys):
    command(fail_with(AssertionError("ran")))
    assert main(["doctor", "x=1", "--help"]) == 0
    assert "usage: draftlab doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("bad"), 2), (LosslessViolation("bad"), 3), (DraftlabError("bad"), 1)],
)
def test_an_error_of_ours_is_one_message_without_a_traceback(command, capsys, error, code):
    command(fail_with(error))
    assert main(["doctor"]) == code
    err = capsys.readouterr().err
    assert err.startswith("draftlab doctor: bad\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/runs/a"),
        RuntimeError("while serializing: No space left on device (os error 28)"),
        PermissionError(errno.EACCES, "Permission denied", "/runs/a"),
    ],
)
def test_what_a_disk_refuses_is_one_sentence(command, capsys, error):
    command(fail_with(error))
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.startswith("draftlab doctor: cannot use ")
    assert err.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_full_disk_under_stdout_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "draftlab.cli.main", "recipes"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "cannot write to standard output: no space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_of_a_thing_is_its_own_part(capsys):
    assert main(["bench", "loss", "--help"]) == 0
    out = capsys.readouterr().out
    assert "usage: draftlab bench loss" in out
    assert out.count("usage: ") == 1
    assert main(["bench", "--help"]) == 0
    assert capsys.readouterr().out.count("usage: ") > 4


def test_another_error_shows_its_traceback(command, capsys):
    command(fail_with(ZeroDivisionError("oops")))
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ZeroDivisionError: oops" in err


@pytest.mark.parametrize(
    ("stop", "again"),
    [
        (KeyboardInterrupt(), "to start again: draftlab doctor 'init=My Run'"),
        (
            KeyboardInterrupt("draftlab train resume=outputs/x"),
            "to go on: draftlab train resume=outputs/x",
        ),
    ],
)
def test_an_interrupt_says_how_to_go_on(command, capsys, stop, again):
    command(fail_with(stop))
    assert main(["doctor", "init=My Run"]) == 130
    assert capsys.readouterr().err.endswith(f"interrupted; {again}\n")


def test_the_same_words_go_on_where_a_command_is_resumable(monkeypatch, capsys):
    from draftlab.cli import regenerate

    monkeypatch.setattr(regenerate, "run", fail_with(KeyboardInterrupt()))
    assert main(["regenerate"]) == 130
    assert "to go on: draftlab regenerate" in capsys.readouterr().err


def test_a_command_without_a_file_is_a_clear_error(monkeypatch, capsys):
    monkeypatch.setitem(main_module.COMMANDS, "nowhere", "does nothing")
    assert main(["nowhere"]) == 2
    assert "`draftlab nowhere` is not part of this version" in capsys.readouterr().err


def test_light_commands_and_misspelt_words_do_not_load_torch():
    code = (
        "import sys, draftlab\n"
        "from draftlab.cli.main import main\n"
        "for words in (['--help'], ['recipes'], ['runs'], ['train', '--help']):\n"
        "    assert main(words) == 0\n"
        "for command in ('train', 'regenerate', 'check', 'eval', 'audit', 'generate', 'export'):\n"
        "    assert main([command, 'no.such=1']) == 2\n"
        "heavy = {'torch', 'transformers', 'datasets', 'wandb', 'matplotlib'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
