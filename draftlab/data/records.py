"""Chats: every usual shape of a record in, one plain `Conversation` out.

In: one parsed row. Out: a conversation, or the reason why the row is none. Read first:
`parse_record`. The rows come from conversations.py.

Shapes understood: OpenAI `messages`, ShareGPT `conversations` (from/value or role/content),
`prompt` (one user turn, or a list of turns) with an optional `completion`, and `text` already
rendered by the target's template. `system` may be a field or a turn.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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


def parse_record(
    record: object,
    *,
    source: str,
    domain: str,
    messages_field: str | None = None,
    find_opening: Callable[[], str | None] | None = None,
) -> Conversation:
    """Turn one parsed row into a conversation.

    Args:
        record: the row.
        source: where it stands, "file:line".
        domain: of a row that names none.
        messages_field: field of the chat, or None to look for the usual names.
        find_opening: gives what opens an answer in the target's chat template, asked once there
            is text; `text` that holds it is a rendered chat. Where it gives None there is no such
            marker; None itself: rendered text is of no use here.

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
        text, opening = record.get("text"), None
        if find_opening is not None and isinstance(text, str):
            opening = find_opening()
            if opening is not None and opening in text:
                return Conversation(messages=(), text=text, **head)
        reads_text = find_opening is not None
        raise ValueError(_explain_no_chat(record, messages_field, opening, reads_text=reads_text))
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


def _explain_no_chat(
    record: Mapping[str, Any], field: str | None, opening: str | None, *, reads_text: bool
) -> str:
    seen = ", ".join(str(key) for key in record) or "none"
    if field:
        return f"no chat field {field} (fields: {seen})"
    start = f"no chat field (fields: {seen}); "
    if not reads_text:
        if "text" in record:
            return (
                f"{start}rendered text cannot be asked, as its last question is not cut out; give "
                "messages or prompt"
            )
        return f"{start}expected messages, conversations or prompt"
    if "text" not in record:
        return f"{start}expected messages, conversations, prompt or text"
    if not isinstance(record["text"], str):
        return f"{start}text is {_kind(record['text'])}, expected a string"
    if opening is None:
        return (
            f"{start}text cannot be read, as the target's chat template opens answers by no "
            "special token; give messages or prompt"
        )
    return (
        f"{start}text is read only where it holds the answer marker of the target's chat "
        f"template, {opening!r}"
    )


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


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
