"""What `draftlab generate` is asked: one text, or many from a file or from stdin."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import ConfigError

log = logging.getLogger(__name__)

_CHATS = (".jsonl", ".json", ".parquet")
_STDIN = "-"


@dataclass(frozen=True, slots=True)
class Question:
    """A chat whose next turn is asked for.

    Attributes:
        title: the last thing said, for people.
        place: where it stands, such as "questions.txt:7".
        messages: turns, the last one a user's or a tool's.
        tools: tool descriptions, or None.
    """

    title: str
    place: str
    messages: tuple[Any, ...]
    tools: tuple[dict[str, Any], ...] | None = None


def read_questions(prompt: str | None, prompts: str | None, cache_dir: Path) -> list[Question]:
    """Read what is asked.

    Args:
        prompt: one text, or "-" for the whole of stdin.
        prompts: a file, or "-" for stdin: a text a line, or chats if its name says so.
        cache_dir: folder in which the `datasets` library may keep its files.

    Raises:
        ConfigError: nothing, or both, or a file that is not there or asks nothing.
        DataError: lines that are no chats, each named.
    """
    if (prompt is None) == (prompts is None):
        raise ConfigError(
            'pass either prompt="..." or prompts=FILE'
            + ("" if prompt is None else f"; not both prompt={prompt!r} and prompts={prompts}")
        )
    if prompts is None:
        text = _read_stdin().strip() if prompt == _STDIN else prompt
        if not text:
            raise ConfigError('nothing to answer: the prompt is empty; pass prompt="..."')
        return [_ask(text, "prompt")]
    if Path(prompts).suffix.lower() in _CHATS:
        found = _read_chats(Path(prompts).expanduser(), cache_dir)
    else:
        file = "stdin" if prompts == _STDIN else Path(prompts).name
        found = [
            _ask(line.strip(), f"{file}:{number}")
            for number, line in enumerate(_read_lines(prompts), start=1)
            if line.strip()
        ]
    if not found:
        raise ConfigError(f"prompts={prompts} asks nothing: expected a prompt a line")
    return found


def _ask(text: str, place: str) -> Question:
    return Question(text, place, ({"role": "user", "content": text},))


def _read_stdin() -> str:
    return sys.stdin.read().removeprefix("\ufeff")  # of a file made on Windows


def _read_lines(prompts: str) -> list[str]:
    """Part a text at newlines alone: a page break or U+2028 belongs to a question."""
    if prompts == _STDIN:
        return _read_stdin().split("\n")
    path = Path(prompts).expanduser()
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        unpack = "; it is compressed by gzip: unpack it first" if path.suffix == ".gz" else ""
        raise ConfigError(f"cannot read prompts={path}: {error}{unpack}") from None


def _read_chats(path: Path, cache_dir: Path) -> list[Question]:
    from draftlab.data.conversations import read_files, to_prompt
    from draftlab.data.unasked import describe_unasked

    if not path.is_file():
        raise ConfigError(f"prompts={path} does not exist; expected a file of chats")
    read = read_files([path], cache_dir=cache_dir).conversations
    if unasked := describe_unasked(read):
        log.warning("of the chats to answer:\n%s", unasked)
    chats = map(to_prompt, read)
    return [
        Question(str(chat.messages[-1]["content"] or ""), chat.source, chat.messages, chat.tools)
        for chat in chats
        if chat is not None
    ]
