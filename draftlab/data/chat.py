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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from draftlab.data.records import Conversation, Message
from draftlab.data.template import (
    RowProblem,
    decode,
    encode_text,
    encode_texts,
    find_answer_marker,
    load_marks,
    render,
    special_tokens,
)
from draftlab.errors import DataError


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
    return encode_text(tokenizer, render(tokenizer, messages, tools, options, to_answer=True))


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
    chosen, left_out = choose_turns(messages, turns)
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
        prompt = render(self.tokenizer, before, self.tools, self.options, to_answer=True)
        done = render(self.tokenizer, until, self.tools, self.options)
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
        text = render(self.tokenizer, self.messages, self.tools, self.options)
        if not all(text.startswith(answer.closed) for answer in answers):
            return None
        try:
            ids, spans = _encode_spans(
                self.tokenizer, text, [(a.prompt, a.closed) for a in answers]
            )
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
        found = load_marks(self.tokenizer, shown, self.tools, self.options)
        # other ids: a token spans the border (see _encode_answer)
        if found is None or found[0][: len(ids)] != ids:
            return [True] * len(ids)
        return found[1]


def _encode_spans(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[str, str]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a text, and find where each (prompt, prompt with answer) ends on its ids."""
    # one call, so that a fast tokenizer works on them at the same time
    encoded = encode_texts(tokenizer, [text, *(piece for span in spans for piece in span)])
    ids, prefixes = encoded[0], encoded[1:]
    if any(ids[: len(prefix)] != prefix for prefix in prefixes):
        raise _NotAPrefix
    ends = [len(prefix) for prefix in prefixes]
    return ids, list(zip(ends[::2], ends[1::2], strict=True))


def _encode_answer(
    tokenizer: PreTrainedTokenizerBase, prompt: str, closed: str
) -> tuple[list[int], int]:
    ids, prefix = encode_texts(tokenizer, [closed, prompt])
    if ids[: len(prefix)] == prefix:
        return ids, len(prefix)
    # A token spans the border (an answer that begins with a line break, say). The target read the
    # prompt's ids as they are and went on from there, so the answer is encoded apart.
    joined = prefix + encode_text(tokenizer, closed[len(prompt) :])
    if decode(tokenizer, joined) != decode(tokenizer, ids):
        raise RowProblem("an answer cannot be split from its prompt on tokens")
    return joined, len(prefix)


def choose_turns(
    messages: Sequence[Message], turns: Literal["each", "last"]
) -> tuple[list[int], list[str]]:
    """Choose the answers to learn, by their turns alone.

    Args:
        messages: all turns of a chat.
        turns: each, or the last one only.

    Returns:
        Places of the answers that are learned, and why each of the others is not.

    Raises:
        RowProblem: none is.
    """
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
    question: Message = {"role": "user", "content": "Is it on?"}
    asked = render(tokenizer, [question], None, options, to_answer=True)
    rest = text.partition(opening)[2]
    # what begins a turn stands there again: the answer has ended, and nothing says where
    if not closing and any(mark in asked and mark in rest for mark in special_tokens(tokenizer)):
        raise RowProblem(
            "rendered text goes on after an answer, but the template closes answers by nothing"
        )
    bos = tokenizer.bos_token
    if isinstance(bos, str) and not text.startswith(bos) and asked.startswith(bos):
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
    try:
        ids, borders = _encode_spans(tokenizer, text, spans)
    except _NotAPrefix:
        raise RowProblem("an answer cannot be split from its prompt on tokens") from None
    mask = [False] * len(ids)
    for start, end in borders:
        mask[start:end] = [True] * (end - start)
    return EncodedChat([EncodedRow(ids, mask)], left_out, was_split=False)
