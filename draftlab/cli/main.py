"""`draftlab COMMAND ...`: finds the command's file, runs it, and turns errors into exit codes.

Imports nothing heavy: `draftlab --help` answers at once.
"""

import difflib
import importlib
import importlib.metadata
import logging
import os
import re
import shlex
import sys
import traceback

from draftlab.cli.disk import explain_refusal
from draftlab.errors import ConfigError, DraftlabError

# command -> what it does; the file is draftlab/cli/<command>.py with HELP and run(args)
COMMANDS = {
    "demo": "train, prove and time a drafter for a small real model, and report (the first thing)",
    "recipes": "list the recipes, show one composed, or copy one to edit",
    "check": "compose and check a run, and estimate disk, memory and minutes, without doing it",
    "regenerate": "let the target answer the training prompts (resumable)",
    "train": "train a drafter for a target",
    "eval": "measure acceptance and speed by domain, and audit losslessness",
    "audit": "check on your target that a drafter leaves its answers as they are",
    "skips": "search the layers a target skips to draft for itself (resumable)",
    "generate": "answer a prompt with a drafter, accepted draft tokens in colour",
    "bench": "time decoding, drafter families, training steps, the loss, stored features, a GPU",
    "export": "write a drafter in a serving engine's format",
    "report": "write a run's report again",
    "compare": "set runs side by side",
    "runs": "list the runs",
    "doctor": "say what this machine has and what is missing",
}

# the same words go on where these stopped; others begin anew
_RESUMABLE = ("train", "regenerate", "demo", "bench families")

HELP = """draftlab: train, prove, time and export drafters for lossless speculative decoding

usage: draftlab COMMAND [THING] [key=value ...]

commands:
{commands}

Every choice is key=value: a group's option (target=tiny), one of its keys (optim.lr=1e-4), a
recipe (recipe=FAMILY/NAME). Paths and text are typed as they are, quoted for the shell only.

  draftlab COMMAND --help     keys and examples of a command
  draftlab --version          this version's number
  draftlab train              the smallest whole run: under a minute on a laptop
  draftlab recipes            ready-made choices
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: words after `draftlab`; this process's when None.

    Returns:
        The exit code: see draftlab/cli/__init__.py.
    """
    words = sys.argv[1:] if argv is None else argv
    command = words[0] if words else "--help"
    if command in ("--help", "-h", "help"):
        print(main_help())
        return 0
    if command == "--version":
        print(importlib.metadata.version("draftlab"))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("draftlab").setLevel(logging.INFO)
    try:
        code = _run(command, words[1:])
        sys.stdout.flush()  # here, where a refusal still has words
        return code
    except DraftlabError as error:
        print(f"draftlab {command}: {error}", file=sys.stderr)
        if isinstance(error, ConfigError) and command in COMMANDS:
            print(f"keys and examples: draftlab {command} --help", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        # a command that knows better says how to go on
        goes_on = str(stop) or " ".join(words).startswith(_RESUMABLE)
        again = str(stop) or shlex.join(["draftlab", *words])
        what = "go on" if goes_on else "start again"
        print(f"\ninterrupted; to {what}: {again}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _close_stdout()  # the reader (head, less) left
        return 1
    except Exception as error:
        said = explain_refusal(error)
        if said is not None:
            if getattr(error, "filename", None) is None and _stdout_is_refused():
                said = said.replace("cannot use a file", "cannot write to standard output")
                _close_stdout()
            print(f"draftlab {command}: {said}", file=sys.stderr)
            return 1
        traceback.print_exc()
        print(
            f"draftlab {command}: failed on an error it did not foresee (above); "
            "`draftlab doctor` shows what this machine has",
            file=sys.stderr,
        )
        return 1


def main_help() -> str:
    """Give the text of `draftlab --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return HELP.format(commands="\n".join(lines))


def _run(command: str, args: list[str]) -> int:
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=3) or list(COMMANDS)
        raise ConfigError(f"unknown command {command!r}; did you mean {', '.join(near)}?")
    name = f"draftlab.cli.{command}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ConfigError(f"`draftlab {command}` is not part of this version") from None
    if any(word in ("--help", "-h") for word in args):
        text = _part_of(module.HELP, command, args)
        print(f"draftlab {command}: {COMMANDS[command]}\n\n{text}\n")
        return 0
    return module.run(args)


def _part_of(text: str, command: str, args: list[str]) -> str:
    """Give the usage that is about the thing named, such as `bench loss`; else all of the text."""
    parts = re.split(r"\n\n(?=usage: )", text.strip())
    begins = f"usage: draftlab {command} {args[0]}"
    return next((part for part in parts if f"{part} ".startswith(f"{begins} ")), text.strip())


def _stdout_is_refused() -> bool:
    try:
        print(flush=True)  # what was refused may be forgotten by now, so a line is tried
    except OSError:
        return True
    return False


def _close_stdout() -> None:
    """Point stdout elsewhere, so that closing it says nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
