"""Chats that cannot be asked, and why: what is dropped where the target gives the answers.

In: conversations. Out: counts by reason, and the words for people. Read first: `explain_unasked`.
"""

from collections import Counter
from collections.abc import Sequence

from draftlab.data.conversations import Conversation, to_prompt

_TEXT = "rendered text, whose last question is not cut out"
_NO_QUESTION = "no question"
UNASKED_ADVICE = {
    _TEXT: "give rendered text as `messages` or `prompt`",
    _NO_QUESTION: "give chats with a user's turn",
}
"""What to do, by reason."""
_SHOWN_EXAMPLES = 5


def explain_unasked(chat: Conversation) -> str | None:
    """Tell why a chat cannot be asked, a key of `UNASKED_ADVICE`; None where it can."""
    if chat.text is not None:
        return _TEXT
    return _NO_QUESTION if to_prompt(chat) is None else None


def count_unasked(chats: Sequence[Conversation]) -> dict[str, int]:
    """Count the chats that cannot be asked, by reason."""
    return dict(Counter(reason for chat in chats if (reason := explain_unasked(chat))))


def describe_unasked(chats: Sequence[Conversation]) -> str:
    """Say how many chats are dropped and why, with the first of them; empty where none is."""
    counts = count_unasked(chats)
    lines = [
        f"dropped {count}: {reason}; {UNASKED_ADVICE[reason]}" for reason, count in counts.items()
    ]
    unasked = [chat for chat in chats if explain_unasked(chat)]
    lines += [f"  {chat.source} ({chat.id})" for chat in unasked[:_SHOWN_EXAMPLES]]
    return "\n".join(lines)
