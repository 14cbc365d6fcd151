"""The target's chat template: rendering by it, and what it says about itself.

In: turns and the target's tokenizer. Out: text and ids exactly as a server would give them to the
target. Read first: `render`. Thoughts and tool arguments are put where the template at hand looks
for them, because templates differ in that.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from draftlab.data.records import Message
from draftlab.errors import DataError

_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")


class RowProblem(DataError):
    """Why one chat gives no row; its text is the reason, without the chat's name."""


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode rendered text; the template has written every special token, so none is added."""
    return encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Encode rendered texts in one call, so that a fast tokenizer works on them in parallel."""
    encoded: Any = tokenizer(
        texts, add_special_tokens=False, truncation=False, padding=False, verbose=False
    )
    return encoded["input_ids"]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode with every special token, and without tidying."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Give the tokens that were added to the vocabulary, as text."""
    return {token.content for token in tokenizer.added_tokens_decoder.values()}


def find_answer_marker(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> tuple[str, str] | None:
    """Find the texts with which the template opens and closes an answer.

    Returns:
        Opening and closing, such as "<|im_start|>assistant" and a line break, "<|im_end|>"; None
        when the opening holds no special token, because then plain words in a question could be
        taken for it.
    """
    question: Message = {"role": "user", "content": "Is it on?"}
    answer: Message = {"role": "assistant", "content": "It is."}
    asked = render(tokenizer, [question], None, options)
    prompt = render(tokenizer, [question], None, options, to_answer=True)
    done = render(tokenizer, [question, answer], None, options)
    if not (prompt.startswith(asked) and done.startswith(prompt)):
        return None
    opening = prompt[len(asked) :]
    if not any(token in opening for token in special_tokens(tokenizer)):
        return None
    return opening, done.rpartition("It is.")[2].rstrip()


def compute_tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Compute a sha256 over everything that turns text into ids (the template is not in it)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        parts = json.loads(backend.to_str())
        # left behind by whoever used the tokenizer last; says nothing about the vocabulary
        parts.pop("truncation", None)
        parts.pop("padding", None)
    else:
        parts = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    parts["special"] = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_template(
    tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Give the source of the chat template in use.

    Raises:
        DataError: the tokenizer has none.
    """
    try:
        return tokenizer.get_chat_template(tools=list(tools) if tools else None)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template ({error}); use an "
            "instruction-tuned target, or put a chat_template.jinja beside its tokenizer.json"
        ) from None


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    *,
    to_answer: bool = False,
) -> str:
    """Render turns by the tokenizer's own template.

    Args:
        tokenizer: the target's.
        messages: turns as `Conversation` holds them.
        tools: tool descriptions, or None.
        options: further variables of the template.
        to_answer: add the generation prompt.

    Raises:
        RowProblem: the template refuses the chat.
    """
    return _render_form(tokenizer, messages, tools, options, to_answer=to_answer)[0]


def load_marks(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
) -> tuple[list[int], list[bool]] | None:
    """Give ids and what the template's generation markers enclose, or None where it has none."""
    if not _MARKERS.search(load_template(tokenizer, tools)):
        return None
    _, as_text = _render_form(tokenizer, messages, tools, options, to_answer=False)
    marked: Any = _apply(
        tokenizer,
        messages,
        tools,
        options,
        as_text,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return marked["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]


def _render_form(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    *,
    to_answer: bool,
) -> tuple[str, bool]:
    """Render, and say whether tool arguments had to be text."""

    def attempt(as_text: bool) -> str:
        return _apply(
            tokenizer,
            messages,
            tools,
            options,
            as_text,
            tokenize=False,
            add_generation_prompt=to_answer,
        )

    arguments = _call_arguments(messages)
    if not arguments:
        return attempt(as_text=False), False
    # Servers hand arguments to the template as objects; a template that wants text fails on them,
    # or prints them the way Python does.
    try:
        text = attempt(as_text=False)
    except RowProblem:
        return attempt(as_text=True), True
    if any(str(each) in text for each in arguments):
        return attempt(as_text=True), True
    return text, False


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    as_text: bool,
    **wanted: Any,
) -> Any:
    template = load_template(tokenizer, tools)
    try:
        return tokenizer.apply_chat_template(
            _adapt_messages(template, messages, as_text),
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=template,
            **wanted,
            **(options or {}),
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
        raise RowProblem(f"the chat template refuses the chat: {error}") from error


def _call_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    objects = [_as_object(call["function"]["arguments"]) for call in calls]
    return [each for each in objects if isinstance(each, dict) and each]


def _as_object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _adapt_messages(
    template: str, messages: Sequence[Message], calls_as_text: bool
) -> list[dict[str, Any]]:
    """Put thoughts and tool arguments where this template looks for them."""
    field = next((name for name in _THOUGHT_FIELDS if _reads_field(template, name)), None)
    adapted = []
    for message in messages:
        turn = {**message, "content": message.get("content") or ""}
        turn.pop("weight", None)
        thought = turn.pop("reasoning_content", None)
        if thought and field:
            turn[field] = thought
        elif thought:
            # written out, since the template would drop it in silence
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{turn['content']}"
        if turn.get("tool_calls"):
            turn["tool_calls"] = [_adapt_call(call, calls_as_text) for call in turn["tool_calls"]]
        adapted.append(turn)
    return adapted


def _reads_field(template: str, name: str) -> bool:
    return (
        re.search(rf"""\.{name}\b|\[['"]{name}['"]\]|get\(['"]{name}['"]""", template) is not None
    )


def _adapt_call(call: dict[str, Any], as_text: bool) -> dict[str, Any]:
    arguments = _as_object(call["function"]["arguments"])
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
