"""Chats from files and data sets, and every bad line by its number.

In: JSONL, JSON and Parquet files, or a hub data set. Out: conversations, and every bad line with
its file, physical line number and reason. Read first: `read_files`. What a record may look like
stands in records.py.

JSON lines are parsed here, not by an Arrow reader, because tool arguments change type from row to
row (case O-02) and because every bad line has to be named (case O-03). Parquet and hub rows come
from Arrow: fields that are null there count as absent.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftlab.data.records import Conversation, Message, parse_record
from draftlab.errors import DataError

__all__ = [
    "BadLine",
    "Conversation",
    "Message",
    "Reading",
    "describe_bad_lines",
    "list_files",
    "parse_record",
    "read_files",
    "read_hub",
    "to_prompt",
]

_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MAX_LISTED = 50
_SUFFIXES = (".jsonl", ".json", ".parquet")


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no chat: its file, physical line (or item) number from 1, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading gave: the chats, and the lines skipped on request."""

    conversations: list[Conversation]
    bad_lines: list[BadLine]


def read_files(
    paths: Iterable[str | Path],
    *,
    cache_dir: Path,
    domain: str = "own",
    on_bad_line: Literal["fail", "skip"] | None = None,
    messages_field: str | None = None,
    find_opening: Callable[[], str | None] | None = None,
) -> Reading:
    """Read all files before anything else is done with any of them.

    Args:
        paths: files, or folders whose .jsonl, .json and .parquet files are read in name order.
        domain: domain of rows that name none.
        on_bad_line: fail stops with the list of all bad lines; skip returns it; None fails where
            no setting could choose otherwise.
        cache_dir: folder in which the `datasets` library may keep its files.
        messages_field: field of the chat, or None to look for the usual names.
        find_opening: as `parse_record` takes it; None refuses `text` fields.

    Raises:
        DataError: a file is missing or not readable, or (with fail) any line is bad.
    """
    good: list[Conversation] = []
    bad: list[BadLine] = []
    for path in list_files(paths):
        rows = _rows_of(path, cache_dir, bad)
        good.extend(_parse_rows(rows, path.name, domain, messages_field, find_opening, bad))
    return _finish(good, bad, on_bad_line)


def read_hub(
    name: str,
    *,
    subset: str | None,
    split: str,
    domain: str,
    on_bad_line: Literal["fail", "skip"],
    cache_dir: Path,
    messages_field: str | None = None,
    find_opening: Callable[[], str | None] | None = None,
) -> Reading:
    """Read one split of a hub data set (or of a local folder the `datasets` library knows).

    Raises:
        DataError: the data set cannot be loaded, or (with on_bad_line=fail) any row is bad.
    """
    bad: list[BadLine] = []
    rows = _load_dataset(name, name=subset, split=split, cache_dir=cache_dir)
    good = list(_parse_rows(rows, name, domain, messages_field, find_opening, bad))
    return _finish(good, bad, on_bad_line)


def list_files(paths: Iterable[str | Path]) -> list[Path]:
    """List the files that paths and folders stand for.

    Raises:
        DataError: naming the path that does not exist, or the folder without any data file.
    """
    files: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if _kind_of(p) in _SUFFIXES and p.is_file())
            if not inside:
                raise DataError(f"{path} holds no {', '.join(_SUFFIXES)} file; give a data file")
            files.extend(inside)
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(
                f"data file {path} does not exist (looked in {path.parent.resolve()}); "
                "check data.paths"
            )
    return files


def to_prompt(conversation: Conversation) -> Conversation | None:
    """Cut a chat before its last answer, so that the target can give that answer itself.

    Returns:
        The chat up to its last user or tool turn; None when it has none.
    """
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] not in ("user", "tool"):
        messages.pop()
    return replace(conversation, messages=tuple(messages)) if messages else None


def _kind_of(path: Path) -> str:
    return path.suffix.lower()


def _rows_of(path: Path, cache_dir: Path, bad: list[BadLine]) -> Iterable[tuple[int, object]]:
    if _kind_of(path) == ".parquet":
        return _load_dataset(
            "parquet", data_files=[str(path)], split="train", cache_dir=cache_dir, shown=path
        )
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        unpack = shlex.join(["gunzip", "-k", str(path)])
        raise DataError(f"{path} is compressed by gzip, expected plain text; unpack it: {unpack}")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text, expected UTF-8; save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark would hide the first row
    if _kind_of(path) == ".json" and data.lstrip()[:1] == b"[":
        return _json_items(path, data)
    return _json_lines(path, data, bad)


def _json_items(path: Path, data: bytes) -> Iterable[tuple[int, object]]:
    try:
        return list(enumerate(json.loads(data.decode("utf-8")), start=1))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}; repair it or give one object a line") from (
            None
        )


def _json_lines(path: Path, data: bytes, bad: list[BadLine]) -> Iterator[tuple[int, object]]:
    # split on \n alone: U+2028 and its kin are legal inside JSON texts
    for number, raw in enumerate(data.split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").strip()
            if line:
                yield number, json.loads(line)
        except UnicodeDecodeError as error:
            bad.append(BadLine(path.name, number, f"not UTF-8 at byte {error.start + 1}"))
        except json.JSONDecodeError as error:
            what = error.msg.removesuffix(" at")  # "Unterminated string starting at"
            bad.append(BadLine(path.name, number, f"not JSON: {what} at column {error.colno}"))
        except RecursionError:
            bad.append(BadLine(path.name, number, "not JSON: nested too deeply"))


def _load_dataset(
    source: str, *, cache_dir: Path, shown: object = None, **arguments: Any
) -> Iterable[tuple[int, object]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source, cache_dir=str(cache_dir / "datasets"), **arguments)
    except Exception as error:  # the library raises whatever its readers and the network raise
        raise DataError(
            f"cannot load {shown or source}: {type(error).__name__}: {error}; check the name, its "
            "subset and split, and the network"
        ) from error
    return ((number, _without_nulls(row)) for number, row in enumerate(rows, start=1))


def _without_nulls(value: object) -> object:
    # Arrow gives every struct the fields of all rows, null where a row had none
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parse_rows(
    rows: Iterable[tuple[int, object]],
    file: str,
    domain: str,
    messages_field: str | None,
    find_opening: Callable[[], str | None] | None,
    bad: list[BadLine],
) -> Iterator[Conversation]:
    for number, row in rows:
        try:
            conversation = parse_record(
                row,
                source=f"{file}:{number}",
                domain=domain,
                messages_field=messages_field,
                find_opening=find_opening,
            )
            if _LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False, default=str)):
                raise ValueError("holds half of a surrogate pair, which no tokenizer can read")
            yield conversation
        except ValueError as error:
            bad.append(BadLine(file, number, str(error)))


def _finish(
    good: list[Conversation], bad: list[BadLine], on_bad_line: Literal["fail", "skip"] | None
) -> Reading:
    bad = sorted(bad, key=lambda line: (line.file, line.line))
    if bad and on_bad_line != "skip":
        advice = "pass data.on_bad_line=skip to leave them out" if on_bad_line else "take them out"
        raise DataError(
            f"{len(bad)} bad line{'s' if len(bad) > 1 else ''} in the data:\n"
            f"{describe_bad_lines(bad)}\nrepair them, or {advice}"
        )
    return Reading(good, bad)


def describe_bad_lines(bad: Sequence[BadLine | str]) -> str:
    """List bad lines, the first 50 in full and the rest as a count."""
    lines = [f"  {line}" for line in bad[:_MAX_LISTED]]
    if len(bad) > _MAX_LISTED:
        lines.append(f"  and {len(bad) - _MAX_LISTED} more")
    return "\n".join(lines)
