"""The one style of command lines: at most a few things, then key=value words."""

import re
from collections.abc import Collection, Mapping, Sequence

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


def read_options(
    words: Sequence[str], defaults: dict[str, str], *, group: str = ""
) -> dict[str, str]:
    """Read the few options of a command, those that compose nothing.

    Args:
        words: key=value words.
        defaults: every option the command has, without its group.
        group: what each word begins with, such as `bench.`.

    Raises:
        ConfigError: an option it does not have.
    """
    options = dict(defaults)
    for word in words:
        key, _, value = word.removeprefix(group).partition("=")
        if key not in defaults:
            known = ", ".join(f"{group}{name}=" for name in defaults) or "none"
            raise ConfigError(f"unknown option {word!r}; known options: {known}")
        options[key] = value
    return options


def refuse_replaced(
    words: Sequence[str], command: str, replaced: Mapping[str, str], *, groups: Collection[str] = ()
) -> None:
    """Refuse words whose keys a command replaces by its own.

    A limit that `decode.min_new_tokens` has to fit under is let through beside that word.

    Args:
        words: key=value words, as typed.
        command: its name.
        replaced: a key without effect -> what to pass instead.
        groups: what may stand before a key, such as the families of a bench.

    Raises:
        ConfigError: naming the word and what to pass.
    """
    keys = [word.partition("=")[0] for word in words]
    keys = [key.partition(".")[2] if key.partition(".")[0] in groups else key for key in keys]
    for word, key in zip(words, keys, strict=True):
        is_bound = key == "decode.max_new_tokens" and "decode.min_new_tokens" in keys
        if key in replaced and not is_bound:
            raise ConfigError(f"{word} has no effect on {command}; pass {replaced[key]}")


def take_minutes(
    words: Sequence[str], *, default: float, least: float, expected: str
) -> tuple[float, bool, list[str]]:
    """Take `minutes=` and `fresh=` out of the words of a command that plans its own time.

    Args:
        words: key=value words.
        default: minutes when none are named.
        least: fewest minutes; a day is the most.
        expected: what the error says was expected.

    Returns:
        Minutes, whether to start anew, and the other words in order.

    Raises:
        ConfigError: a value that is none.
    """
    minutes, is_fresh, rest = default, False, []
    for word in words:
        key, _, value = word.partition("=")
        if key == "minutes":
            try:
                minutes = float(value)
            except ValueError:
                minutes = -1.0
            if not least <= minutes <= 24 * 60:
                raise ConfigError(f"minutes={value}: expected {expected}")
        elif key == "fresh":
            if value not in ("true", "false"):
                raise ConfigError(f"fresh={value}: expected true or false")
            is_fresh = value == "true"
        else:
            rest.append(word)
    return minutes, is_fresh, rest
