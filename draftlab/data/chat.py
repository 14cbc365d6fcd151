"""A chat as the target reads it: its template, its ids, and exactly what it would have said.

In: a `Conversation` and the target's tokenizer. Out: rows of ids with a loss mask, and prompt ids.
Read first: `encode_chat`, then `_encode_spans`.

How the mask is found. A target that is asked for turn i reads render(turns before i, with the
generation prompt) and writes what render(turns up to i) has beyond that. So the mask is a
difference of two renders, verified on token ids; no text is searched for, no offsets are trusted
(three byte-level tokens can share one character), and no generation markers are needed. A template
that has the markers may only narrow it: the mask then starts at the turn's first marked token.
The end-of-turn marker is learned, white space that the template puts after it is not.

Templates that rewrite history (drop old thoughts) make an earlier answer look other than it was
generated. Then every answer gets a row of its own, with its context as served (case O-07).
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from transformers import PreTrainedTokenizerBase

from draftlab.data.conversations import Conversation, Message
from draftlab.errors import DataError

_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")


class RowProblem(DataError):
    """Why one chat gives no row; its text is the reason, without the chat's name."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Ids of one row, and True where the target spoke."""

    ids: list[int]
    mask: list[bool]


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The rows of one chat.

    Attributes:
        rows: one, or one an answer where the template rewrites history.
        left_out: why, for each answer that carries no loss.
        was_split: the template rewrites history, so that answers have rows of their own.
    """

    rows: list[EncodedRow]
    left_out: list[str]
    was_split: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    """A turn to learn: what the target read, and that with what it then wrote."""

    index: int
    prompt: str
    closed: str


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    mask: list[bool]
    num_answers: int


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a chat with the generation prompt: the very ids a training row starts with.

    Args:
        tokenizer: the target's.
        messages: turns as `Conversation` holds them; the last is the one to answer.
        tools: tool descriptions, or None.
        options: further variables of the template.

    Raises:
        DataError: no turns, no chat template, or the template refuses the chat.
    """
    if not messages:
        raise RowProblem("empty chat")
    return encode_text(tokenizer, _render(tokenizer, messages, tools, options, to_answer=True))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    *,
    turns: Literal["each", "last"] = "each",
    options: Mapping[str, Any] | None = None,
) -> EncodedChat:
    """Encode a chat into training rows.

    Not learned, and counted in `left_out`: empty answers, answers with `weight` 0, an answer before
    any question, and with turns=last all but the last. An empty answer does not teach the end
    marker either.

    Args:
        tokenizer: the target's.
        conversation: turns, or a text already rendered by the template.
        turns: each learns every answer; last learns the chat's last one only.
        options: further variables of the template.

    Raises:
        RowProblem: nothing to learn here, or the template cannot render or split this chat.
        DataError: the tokenizer has no chat template.
    """
    if conversation.text is not None:
        return _encode_rendered(tokenizer, conversation.text, turns, options)
    messages = conversation.messages
    chosen, left_out = _choose_turns(messages, turns)
    chat = _Chat(tokenizer, messages, conversation.tools, options)
    answers = [chat.split_answer(index) for index in chosen]
    whole = chat.build_whole_row(answers) if turns == "each" else None
    rows = [whole] if whole else [chat.build_row(answer) for answer in answers]
    num_unmarked = len(answers) - sum(row.num_answers for row in rows)
    left_out += ["outside the template's generation markers"] * num_unmarked
    encoded = [EncodedRow(row.ids, row.mask) for row in rows if row.num_answers]
    if not encoded:
        raise RowProblem("its answers lie outside the template's generation markers")
    return EncodedChat(encoded, left_out, was_split=len(encoded) > 1)


def check_template(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None
) -> None:
    """Refuse a template whose answers cannot be told from their prompts, before any work.

    Raises:
        DataError: naming the tokenizer, what was seen and what to do.
    """
    probe: list[Message] = [
        {"role": "user", "content": "Is it on?"},
        {"role": "assistant", "content": "It is."},
    ]
    try:
        encode_chat(tokenizer, Conversation("probe", "", tuple(probe)), options=options)
    except RowProblem as problem:
        raise DataError(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} cannot be used for "
            f"training rows: {problem}; let the target answer the prompts itself (draftlab "
            "regenerate keeps the ids it wrote), or give a tokenizer with another chat_template"
        ) from None


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode rendered text; the template has written every special token, so none is added."""
    return tokenizer(
        text, add_special_tokens=False, truncation=False, padding=False, verbose=False
    )["input_ids"]


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
    asked = _render(tokenizer, [question], None, options)
    prompt = _render(tokenizer, [question], None, options, to_answer=True)
    done = _render(tokenizer, [question, answer], None, options)
    if not (prompt.startswith(asked) and done.startswith(prompt)):
        return None
    opening = prompt[len(asked) :]
    if not any(token in opening for token in _special_tokens(tokenizer)):
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


class _NotAPrefix(Exception):
    """A piece of text whose ids are not a prefix of the whole text's ids."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """One chat with its tokenizer: renders, splits and masks."""

    tokenizer: PreTrainedTokenizerBase
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    options: Mapping[str, Any] | None

    def split_answer(self, index: int) -> _Answer:
        """Render what the target read before turn `index`, and that with its answer."""
        before, until = self.messages[:index], self.messages[: index + 1]
        prompt = _render(self.tokenizer, before, self.tools, self.options, to_answer=True)
        done = _render(self.tokenizer, until, self.tools, self.options)
        if not done.startswith(prompt):
            raise RowProblem(
                "an answer cannot be split from its prompt: the rendered chat does not begin with "
                f"the generation prompt, which ends in {prompt[-40:]!r}"
            )
        closed = done.rstrip()
        if len(closed) <= len(prompt):
            raise RowProblem("the template renders an answer as nothing")
        for call in self.messages[index].get("tool_calls") or ():
            if call["function"]["name"] not in closed[len(prompt) :]:
                raise RowProblem("the template does not render tool calls")
        return _Answer(index, prompt, closed)

    def build_whole_row(self, answers: list[_Answer]) -> _Row | None:
        """Build one row for all answers, or nothing where the template rewrites history."""
        text = _render(self.tokenizer, self.messages, self.tools, self.options)
        if not all(text.startswith(answer.closed) for answer in answers):
            return None
        ids = encode_text(self.tokenizer, text)
        try:
            spans = _find_spans(self.tokenizer, ids, [(a.prompt, a.closed) for a in answers])
        except _NotAPrefix:
            return None
        return self._mask(ids, spans, self.messages)

    def build_row(self, answer: _Answer) -> _Row:
        """Build a row that ends with one answer, as it was generated."""
        ids, start = _encode_answer(self.tokenizer, answer.prompt, answer.closed)
        return self._mask(ids, [(start, len(ids))], self.messages[: answer.index + 1])

    def _mask(
        self, ids: list[int], spans: list[tuple[int, int]], shown: tuple[Message, ...]
    ) -> _Row:
        marks = self._load_marks(ids, shown)
        row = _Row(ids, [False] * len(ids), 0)
        num_answers = 0
        for start, end in spans:
            # markers only say where learning begins: their ends are unsure on byte-level tokens
            first = next((t for t in range(start, end) if marks[t]), None)
            if first is not None:
                row.mask[first:end] = [True] * (end - first)
                num_answers += 1
        return _Row(ids, row.mask, num_answers)

    def _load_marks(self, ids: list[int], shown: tuple[Message, ...]) -> list[bool]:
        if not _MARKERS.search(load_template(self.tokenizer, self.tools)):
            return [True] * len(ids)
        marked: Any = self.tokenizer.apply_chat_template(
            _adapt(self.tokenizer, shown, self.tools, calls_as_text=False),
            tools=_as_list(self.tools),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **(self.options or {}),
        )
        if marked["input_ids"][: len(ids)] != ids:  # a token spans the border: see _encode_answer
            return [True] * len(ids)
        return [bool(mark) for mark in marked["assistant_masks"]]


def _find_spans(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], texts: list[tuple[str, str]]
) -> list[tuple[int, int]]:
    spans = []
    for prompt, closed in texts:
        ends = []
        for text in (prompt, closed):
            prefix = encode_text(tokenizer, text)
            if ids[: len(prefix)] != prefix:
                raise _NotAPrefix
            ends.append(len(prefix))
        spans.append((ends[0], ends[1]))
    return spans


def _encode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: str, closed: str
) -> tuple[list[int], int]:
    ids, prefix = encode_text(tokenizer, closed), encode_text(tokenizer, prompt)
    if ids[: len(prefix)] == prefix:
        return ids, len(prefix)
    # A token spans the border (an answer that begins with a line break, say). The target read the
    # prompt's ids as they are and went on from there, so the answer is encoded apart.
    joined = prefix + encode_text(tokenizer, closed[len(prompt) :])
    if _decode(tokenizer, joined) != _decode(tokenizer, ids):
        raise RowProblem("an answer cannot be split from its prompt on tokens")
    return joined, len(prefix)


def _choose_turns(
    messages: Sequence[Message], turns: Literal["each", "last"]
) -> tuple[list[int], list[str]]:
    if not messages:
        raise RowProblem("empty chat")
    chosen, left_out = [], []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            reason = _reason_to_skip(messages, index)
            if reason:
                left_out.append(reason)
            else:
                chosen.append(index)
    if not chosen:
        raise RowProblem(left_out[0] if left_out else "no answer")
    if turns == "last":
        left_out += ["an earlier answer (turns=last)"] * (len(chosen) - 1)
        chosen = chosen[-1:]
    return chosen, left_out


def _reason_to_skip(messages: Sequence[Message], index: int) -> str | None:
    message = messages[index]
    if not any(before["role"] in ("user", "tool") for before in messages[:index]):
        return "an answer before any question"
    if message.get("weight") == 0:
        return "weight 0"
    said = message.get("content") or message.get("reasoning_content") or ""
    if not said.strip() and not message.get("tool_calls"):
        return "empty answer"
    return None


def _encode_rendered(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    turns: Literal["each", "last"],
    options: Mapping[str, Any] | None,
) -> EncodedChat:
    marker = find_answer_marker(tokenizer, options)
    if marker is None:
        raise RowProblem("rendered text, but the template marks answers by no special token")
    opening, closing = marker
    bos = tokenizer.bos_token
    if isinstance(bos, str) and not text.startswith(bos):
        question: Message = {"role": "user", "content": "Is it on?"}
        if _render(tokenizer, [question], None, options).startswith(bos):
            text = bos + text
    spans, left_out = [], []
    end = 0
    while (found := text.find(opening, end)) >= 0:
        start = found + len(opening)
        stop = text.find(closing, start) if closing else -1
        # without its end marker the text was cut inside the answer: no marker is invented
        end = len(text) if stop < 0 else stop + len(closing)
        if text[start : stop if stop >= 0 else end].strip():
            spans.append((text[:start], text[:end]))
        else:
            left_out.append("empty answer")
    if not spans:
        raise RowProblem(left_out[0] if left_out else "no answer")
    if turns == "last":
        left_out += ["an earlier answer (turns=last)"] * (len(spans) - 1)
        spans = spans[-1:]
    ids = encode_text(tokenizer, text)
    try:
        borders = _find_spans(tokenizer, ids, spans)
    except _NotAPrefix:
        raise RowProblem("an answer cannot be split from its prompt on tokens") from None
    mask = [False] * len(ids)
    for start, end in borders:
        mask[start:end] = [True] * (end - start)
    return EncodedChat([EncodedRow(ids, mask)], left_out, was_split=False)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    *,
    to_answer: bool = False,
) -> str:
    template = load_template(tokenizer, tools)

    def render(*, calls_as_text: bool) -> str:
        turns = _adapt(tokenizer, messages, tools, calls_as_text=calls_as_text)
        try:
            text = tokenizer.apply_chat_template(
                turns,
                tools=_as_list(tools),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=to_answer,
                **(options or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise RowProblem(f"the chat template refuses the chat: {error}") from error
        assert isinstance(text, str)
        return text

    arguments = _call_arguments(messages)
    if not arguments:
        return render(calls_as_text=False)
    # Servers hand arguments to the template as objects; a template that wants text fails on them,
    # or prints them the way Python does.
    try:
        text = render(calls_as_text=False)
    except RowProblem:
        return render(calls_as_text=True)
    return render(calls_as_text=True) if any(str(each) in text for each in arguments) else text


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


def _adapt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    calls_as_text: bool,
) -> list[dict[str, Any]]:
    """Put thoughts and tool arguments where this template looks for them."""
    template = load_template(tokenizer, tools)
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


def _as_list(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    return [dict(tool) for tool in tools] if tools else None


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Any:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values()}
