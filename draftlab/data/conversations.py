"""Chats from files: every usual shape in, one plain `Conversation` out.

In: JSONL, JSON and Parquet files, or a hub data set. Out: conversations, and every bad line with
its file, physical line number and reason. Read first: `read_files`, then `parse_record`.

Shapes understood: OpenAI `messages`, ShareGPT `conversations` (from/value or role/content),
`prompt` (one user turn, or a list of turns) with an optional `completion`, and `text` already
rendered by the target's template. `system` may be a field or a turn. JSON lines are parsed here,
not by an Arrow reader, because tool arguments change type from row to row (case O-02) and because
every bad line has to be named (case O-03). Parquet and hub rows come from Arrow: fields that are
null there count as absent.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftlab.errors import DataError

Message = dict[str, Any]
"""role (system, user, assistant or tool), content (text), and where present reasoning_content,
tool_calls, tool_call_id, name, weight."""

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "observation", "tool_response", "function_response", "ipython"), "tool"
    ),
    # ShareGPT's way to write a tool call as a turn of its own
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
_CHAT_FIELDS = ("messages", "conversations", "conversation")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MAX_LISTED = 50


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat, text only.

    Attributes:
        id: the row's own id, or "file:line".
        domain: what the chat is about; figures are reported by it.
        messages: turns in order; empty for a rendered text.
        tools: tool descriptions for the template, or None.
        source: where it stands, "file:line" (lines count from 1).
        text: a chat already rendered by the target's template, or None.
    """

    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    source: str = ""
    text: str | None = None


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
    domain: str,
    on_bad_line: Literal["fail", "skip"],
    cache_dir: Path,
    messages_field: str | None = None,
    is_rendered: Callable[[str], bool] | None = None,
) -> Reading:
    """Read all files before anything else is done with any of them.

    Args:
        paths: files, or folders whose .jsonl, .json and .parquet files are read in name order.
        domain: domain of rows that name none.
        on_bad_line: fail stops with the list of all bad lines; skip returns it.
        cache_dir: folder in which the `datasets` library may keep its files.
        messages_field: field of the chat, or None to look for the usual names.
        is_rendered: says whether a `text` field is a chat in the target's template; None refuses
            `text` fields.

    Raises:
        DataError: a file is missing or not readable, or (with fail) any line is bad.
    """
    good: list[Conversation] = []
    bad: list[BadLine] = []
    for path in list_files(paths):
        rows = _rows_of(path, cache_dir, bad)
        good.extend(_parse_rows(rows, path.name, domain, messages_field, is_rendered, bad))
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
    is_rendered: Callable[[str], bool] | None = None,
) -> Reading:
    """Read one split of a hub data set (or of a local folder the `datasets` library knows).

    Raises:
        DataError: the data set cannot be loaded, or (with on_bad_line=fail) any row is bad.
    """
    bad: list[BadLine] = []
    rows = _load_dataset(name, name=subset, split=split, cache_dir=cache_dir)
    good = list(_parse_rows(rows, name, domain, messages_field, is_rendered, bad))
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
            inside = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES and p.is_file())
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


def parse_record(
    record: object,
    *,
    source: str,
    domain: str,
    messages_field: str | None = None,
    is_rendered: Callable[[str], bool] | None = None,
) -> Conversation:
    """Turn one parsed row into a conversation.

    Raises:
        ValueError: whose text is the reason why the row is no chat.
    """
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {_kind(record)}")
    id_, own_domain = record.get("id"), record.get("domain")
    if own_domain is not None and not isinstance(own_domain, str):
        raise ValueError(f"domain is {_kind(own_domain)}, expected text")
    head = {
        "id": source if id_ is None or id_ == "" else str(id_),
        "domain": own_domain or domain,
        "source": source,
        "tools": _parse_tools(record.get("tools")),
    }
    turns = _find_turns(record, messages_field)
    if turns is None:
        text = record.get("text")
        if is_rendered is not None and isinstance(text, str) and is_rendered(text):
            return Conversation(messages=(), text=text, **head)
        raise ValueError(_explain_no_chat(record, messages_field))
    messages = [_parse_turn(turn, index) for index, turn in enumerate(turns)]
    return Conversation(messages=_add_system(record.get("system"), messages), **head)


def _find_turns(record: Mapping[str, Any], field: str | None) -> list[Any] | None:
    for name in (field,) if field else _CHAT_FIELDS:
        if record.get(name) is not None:
            turns = record[name]
            if not isinstance(turns, list):
                raise ValueError(f"{name} is not a list but {_kind(turns)}")
            return turns
    if field is None and record.get("prompt") is not None:
        turns = _as_turns(record["prompt"], "user", "prompt")
        if record.get("completion") is not None:
            turns = turns + _as_turns(record["completion"], "assistant", "completion")
        return turns
    return None


def _as_turns(value: object, role: str, name: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    raise ValueError(f"{name} is {_kind(value)}, expected text or a list of turns")


def _explain_no_chat(record: Mapping[str, Any], field: str | None) -> str:
    seen = ", ".join(str(key) for key in record) or "none"
    if field:
        return f"no chat field {field} (fields: {seen})"
    if isinstance(record.get("text"), str):
        return (
            f"no chat field (fields: {seen}); text is read only where it holds the answer marker "
            "of the target's chat template"
        )
    return f"no chat field (fields: {seen}); expected messages, conversations, prompt or text"


def _parse_turn(turn: object, index: int) -> Message:
    where = f"turn {index + 1}"
    if not isinstance(turn, dict):
        raise ValueError(f"{where} is not an object but {_kind(turn)}")
    name = turn["role"] if turn.get("role") is not None else turn.get("from")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise ValueError(
            f"{where} has role {name!r}, expected one of {', '.join(sorted(ROLES))} "
            "in `role` or `from`"
        )
    content = turn["content"] if "content" in turn else turn.get("value")
    if role == "function_call":
        return _parse_call_turn(content, where)
    message: Message = {"role": role, "content": _parse_content(content, role, where)}
    if role == "assistant":
        _add_thought(message, turn)
    if turn.get("tool_calls"):
        message["tool_calls"] = _parse_calls(turn["tool_calls"], where)
    for key in ("tool_call_id", "name", "weight"):
        if turn.get(key) is not None:
            message[key] = turn[key]
    return message


def _parse_content(content: object, role: str, where: str) -> str:
    if content is None:
        return ""  # templates would print the word None (case O-02)
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {part.get("type", "text") for part in content}
        if kinds <= {"text"} and all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        if role != "tool":
            raise ValueError(f"{where} has content parts {sorted(map(str, kinds))}, expected text")
    if role == "tool" and isinstance(content, dict | list):
        return json.dumps(content, ensure_ascii=False)
    raise ValueError(f"{where} has content of {_kind(content)}, expected text or null")


def _add_thought(message: Message, turn: Mapping[str, Any]) -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(turn.get(key), str) and turn[key].strip():
            message["reasoning_content"] = turn[key]
            return
    inline = _THOUGHT.fullmatch(message["content"])
    if inline:
        thought, answer = inline.groups()
        message["content"] = answer.lstrip("\n")
        if thought.strip():
            message["reasoning_content"] = thought.strip("\n")


def _parse_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls is not a list but {_kind(calls)}")
    parsed = []
    for call in calls:
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise ValueError(f"{where}: a tool call has no function name")
        function = {"name": inner["name"], "arguments": inner.get("arguments") or {}}
        ids = {"id": call["id"]} if call.get("id") is not None else {}
        parsed.append({**ids, "type": "function", "function": function})
    return parsed


def _parse_call_turn(content: object, where: str) -> Message:
    try:
        value = json.loads(content) if isinstance(content, str) else content
    except ValueError as error:
        raise ValueError(f"{where}: function_call is not JSON: {error}") from None
    calls = _parse_calls(value if isinstance(value, list) else [value], where)
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _parse_tools(tools: object) -> tuple[dict[str, Any], ...] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"tools is text but not JSON: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is {_kind(tools)}, expected a list of objects")
    return tuple(tools)


def _add_system(system: object, messages: list[Message]) -> tuple[Message, ...]:
    if system is None or system == "":
        return tuple(messages)
    if not isinstance(system, str):
        raise ValueError(f"system is {_kind(system)}, expected text")
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return tuple(messages)
        # most templates refuse two system turns
        system = f"{system}\n\n{messages[0]['content']}"
        messages = messages[1:]
    return ({"role": "system", "content": system}, *messages)


_SUFFIXES = (".jsonl", ".json", ".parquet")


def _rows_of(path: Path, cache_dir: Path, bad: list[BadLine]) -> Iterable[tuple[int, object]]:
    if path.suffix == ".parquet":
        return _load_dataset(
            "parquet", data_files=[str(path)], split="train", cache_dir=cache_dir, shown=path
        )
    data = path.read_bytes()
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text, expected UTF-8; save it as UTF-8")
    data = data.removeprefix(b"\xef\xbb\xbf")  # a byte order mark would hide the first row
    if path.suffix == ".json" and data.lstrip()[:1] == b"[":
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
            bad.append(BadLine(path.name, number, f"not JSON: {error.msg} at column {error.colno}"))
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
    is_rendered: Callable[[str], bool] | None,
    bad: list[BadLine],
) -> Iterator[Conversation]:
    for number, row in rows:
        try:
            conversation = parse_record(
                row,
                source=f"{file}:{number}",
                domain=domain,
                messages_field=messages_field,
                is_rendered=is_rendered,
            )
            if _LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False, default=str)):
                raise ValueError("holds half of a surrogate pair, which no tokenizer can read")
            yield conversation
        except ValueError as error:
            bad.append(BadLine(file, number, str(error)))


def _finish(
    good: list[Conversation], bad: list[BadLine], on_bad_line: Literal["fail", "skip"]
) -> Reading:
    bad = sorted(bad, key=lambda line: (line.file, line.line))
    if bad and on_bad_line == "fail":
        raise DataError(
            f"{len(bad)} bad line{'s' if len(bad) > 1 else ''} in the data:\n"
            + describe_bad_lines(bad)
            + "\nrepair them, or pass data.on_bad_line=skip to leave them out"
        )
    return Reading(good, bad)


def describe_bad_lines(bad: list[BadLine]) -> str:
    """List bad lines, the first 50 in full and the rest as a count."""
    lines = [f"  {line}" for line in bad[:_MAX_LISTED]]
    if len(bad) > _MAX_LISTED:
        lines.append(f"  and {len(bad) - _MAX_LISTED} more")
    return "\n".join(lines)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
