"""Text as it comes, and answers that end where a string says so.

In: tokens, one or several at a time. Out: whole characters, and the token at which a stop string
is complete. Tokens are taken in one by one whatever the number that comes at once, so speculative
and plain decoding of the same tokens end at the same one, with the same text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftlab.errors import ConfigError


class TextStream:
    """Turns token ids into text as they come, and never gives half a character (case O-12)."""

    def __init__(self, tokenizer: Any, silent_ids: frozenset[int] = frozenset()) -> None:
        """Start with no text.

        Args:
            tokenizer: of the target; its special tokens give no text.
            silent_ids: further ids that give no text, such as an end token that is not special.
        """
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids
        # only the tokens of the last piece and what came since are decoded again: a decoder may
        # treat the first token of a text differently, and needs some text before to join on
        self._window: list[int] = []
        self._num_given = 0  # tokens of the window whose text was given

    def add(self, token: int) -> str:
        """Take in one token; give the text that is certain by now and was not given before."""
        if token in self._silent_ids:
            return ""
        self._window.append(token)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""  # bytes of a character are still to come
        self._window = self._window[self._num_given :]
        self._num_given = len(self._window)
        return text

    def rest(self) -> str:
        """Give what was held back; at the end there is nothing to wait for."""
        return self._pending()

    def _pending(self) -> str:
        given = self._decode(self._window[: self._num_given])
        return self._decode(self._window)[len(given) :]

    def _decode(self, ids: list[int]) -> str:
        # cleaning up spaces would change text that was given before
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@dataclass(slots=True)
class AnswerText:
    """The text of one answer on its way.

    Attributes:
        stream: what turns its tokens into text.
        text: whole characters so far; ends before the stop string once there was one.
        stop: the stop string that ended it.
    """

    stream: TextStream
    text: str = ""
    stop: str | None = None


class StopStrings:
    """Strings that end an answer.

    The text ends before the string. The token that completes it is the answer's last one, so that
    token counts do not depend on where in a token the string ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        strings: Sequence[str],
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Choose the strings; none is allowed, and then only text is kept.

        Args:
            tokenizer: of the target.
            strings: at least one character each.
            silent_ids: ids that give no text; see `TextStream`.

        Raises:
            ConfigError: an empty string, which would end every answer at once.
        """
        if "" in strings:
            raise ConfigError(
                f"stop strings {list(strings)}: an empty one would end every answer before it "
                "begins; leave it out"
            )
        self.strings = tuple(strings)
        self._tokenizer = tokenizer
        self._silent_ids = silent_ids

    def open(self) -> AnswerText:
        """Start an answer."""
        return AnswerText(TextStream(self._tokenizer, self._silent_ids))

    def feed(self, answer: AnswerText, tokens: Sequence[int]) -> int | None:
        """Take in tokens until a stop string is complete.

        Returns:
            How many of these tokens belong to the answer when a string ended it; None to go on.
        """
        assert answer.stop is None, "this answer has ended"
        for count, token in enumerate(tokens, start=1):
            before = len(answer.text)
            answer.text += answer.stream.add(token)
            if self._end(answer, before):
                return count
        return None

    def close(self, answer: AnswerText) -> str:
        """End an answer for another reason, and give its text.

        Bytes that no character can be made of any more show as U+FFFD.
        """
        if answer.stop is None:
            before = len(answer.text)
            answer.text += answer.stream.rest()
            self._end(answer, before)
        return answer.text

    def settled(self, answer: AnswerText) -> str:
        """Give the text that no stop string can take away any more: what a reader may see."""
        if answer.stop is not None:
            return answer.text
        held = max((_overlap(answer.text, string) for string in self.strings), default=0)
        return answer.text[: len(answer.text) - held]

    def text_of(self, tokens: Sequence[int]) -> str:
        """Give the text of a whole answer."""
        answer = self.open()
        self.feed(answer, tokens)
        return self.close(answer)

    def _end(self, answer: AnswerText, before: int) -> bool:
        """Cut at the earliest string that is complete and was not `before` characters in."""
        found = [
            (answer.text.find(string, max(0, before - len(string) + 1)), place, string)
            for place, string in enumerate(self.strings)
        ]
        found = [hit for hit in found if hit[0] >= 0]
        if not found:
            return False
        start, _, answer.stop = min(found)
        answer.text = answer.text[:start]
        return True


def _overlap(text: str, string: str) -> int:
    """Count the characters at the end of a text that may become this string."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
