"""A prompt as plain text, for models that were trained without a chat template.

The rule: the texts of all turns in order, a blank line between them, roles not written; the end
token is added as the tokenizer adds it. A single question is therefore read as it was typed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.data.records import Message
from draftlab.data.template import RowProblem

_BETWEEN = "\n\n"


def encode_plain_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode what is asked without a template.

    Args:
        tokenizer: the target's.
        messages: turns; the last is the one to answer.
        tools: tool descriptions; they cannot be written without a template.
        options: variables of a template; they would have no effect.

    Raises:
        RowProblem: no text, or something that only a template could write.
    """
    if options:
        raise RowProblem(
            f"the target has no chat template, so {', '.join(options)} would have no effect; drop "
            "data.template_options"
        )
    if tools or any(turn["role"] == "tool" or turn.get("tool_calls") for turn in messages):
        raise RowProblem(
            "the target has no chat template, so tools and their calls cannot be written; leave "
            "this chat out"
        )
    texts = [str(turn.get("content") or "") for turn in messages]
    asked = _BETWEEN.join(text for text in texts if text.strip())
    if not asked:
        raise RowProblem("empty chat")
    encoded: Any = tokenizer(asked, truncation=False, verbose=False)
    return encoded["input_ids"]
