"""How a target is asked: by its chat template, or in plain text where it never had one."""

from collections.abc import Mapping, Sequence
from typing import Any

from draftlab.data import chat
from draftlab.data.plain_text import encode_plain_prompt
from draftlab.data.records import Message
from draftlab.targets.encoder_decoder import EncoderDecoderTarget
from draftlab.targets.target import Target


def encode_turns(
    target: Target,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a chat whose next turn a target is to write.

    Encoder-decoder models of the T5 family have no chat template and read plain text
    (plain_text.py has the rule); a tokenizer that brings a template is asked by it all the same.

    Args:
        target: who is asked.
        messages: turns; the last is the one to answer.
        tools: tool descriptions, or None.
        options: further variables of the template.

    Raises:
        DataError: no turns, no chat template where one is needed, or a chat that cannot be written.
    """
    is_plain = isinstance(target, EncoderDecoderTarget) and not target.tokenizer.chat_template
    encode = encode_plain_prompt if is_plain else chat.encode_prompt
    return encode(target.tokenizer, messages, tools, options)
