"""The one style of command lines: at most a few things, then key=value words."""

import re
from collections.abc import Sequence

from draftlab.errors import ConfigError

_WORD = re.compile(r"[A-Za-z_][\w.]*=", re.DOTALL)


def split_words(args: Sequence[str], *, most: int) -> tuple[list[str], list[str]]:
    """Part things (a run, a file, a text) from key=value words.

    Args:
        args: words after the command.
        most: how many things the command takes.

    Returns:
        Things and key=value words, each in the order typed. `-m` counts as a word.

    Raises:
        ConfigError: too many things, or an option in another style.
    """
    things: list[str] = []
    words: list[str] = []
    for arg in args:
        if _WORD.match(arg) or arg in ("-m", "--multirun"):
            words.append(arg)
        elif arg.startswith("-") and len(arg) > 1:
            raise ConfigError(f"unknown option {arg!r}; every option is key=value, or --help")
        else:
            things.append(arg)
    if len(things) > most:
        takes = "no name, only key=value" if most == 0 else f"at most {most} before key=value"
        raise ConfigError(f"unexpected {things[most]!r}; this command takes {takes}")
    return things, words


def read_options(words: Sequence[str], defaults: dict[str, str]) -> dict[str, str]:
    """Read the few options of a command that composes nothing.

    Args:
        words: key=value words.
        defaults: every option the command has.

    Raises:
        ConfigError: an option it does not have.
    """
    options = dict(defaults)
    for word in words:
        key, _, value = word.partition("=")
        if key not in defaults:
            known = ", ".join(f"{name}=" for name in defaults) or "none"
            raise ConfigError(f"unknown option {word!r}; known options: {known}")
        options[key] = value
    return options
