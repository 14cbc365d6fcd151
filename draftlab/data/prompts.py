"""The prompts that ship with draftlab, written for it: twelve domains, three disjoint splits.

In: the name of a split. Out: conversations that end with a user turn, for the target to answer.
The texts stand in `written/*.jsonl`, one chat a line. A prompt of one split never shares wording,
passage or template with a prompt of another (the tests look for shared runs of words). Domains take
turns, and neighbours of one domain differ in template, so the first N are always a fair sample.
"""

import json
from importlib.resources import files
from typing import Literal

from draftlab.data.conversations import Conversation, parse_record

DOMAINS = (
    "chat",
    "coding",
    "math",
    "reasoning",
    "question_answering",
    "summarization",
    "extraction",
    "tool_calls",
    "translation",
    "writing",
    "roleplay",
    "multilingual",
)
"""Domain names, in the order of every report."""


def load_prompts(split: Literal["train", "validation", "evaluation"]) -> list[Conversation]:
    """Read the prompts of one split; domains take turns in the order of `DOMAINS`.

    Args:
        split: train for answers to learn from, validation for every choice (draft depth, best
            checkpoint, thresholds), evaluation for reported figures only.
    """
    name = f"{split}.jsonl"
    with (files("draftlab.data") / "written" / name).open(encoding="utf-8") as lines:
        return [
            parse_record(json.loads(line), source=f"{name}:{number}", domain="")
            for number, line in enumerate(lines, start=1)
        ]
