"""Streamed text: whole characters only, and nothing lost (case O-12)."""

import pytest

from draftlab.cli.generate import TextStream
from draftlab.targets.tiny import tiny_tokenizer

TEXTS = ["plain", "日本語。", "naïve cafe\u0301", "👩‍👩‍👧 family 🇯🇵", "שלום", "tail 次"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_no_half_character_is_shown_and_none_is_lost(text, tokenizer):
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert len(pieces) == len(text.encode())  # a token is a byte here
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.rest() == text


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    shown = [stream.add(token) for token in tokenizer.encode("a次")[:-1]]
    assert "".join(shown) == "a"
    assert stream.rest() == "\ufffd"


def test_markers_are_not_text(tokenizer):
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode("a<|im_end|>")] == ["a", ""]
