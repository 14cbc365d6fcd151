"""Whole characters only, nothing lost, and answers that end where a string says so."""

import itertools
import random

import pytest

from draftlab.decoding.stops import StopStrings, TextStream
from draftlab.errors import ConfigError
from draftlab.targets.tiny import tiny_tokenizer

TEXTS = [
    "plain",
    "日本語。",
    "naïve cafe\u0301",
    "👩‍👩‍👧 family 🇯🇵",
    "שלום",
    "tail 次",
    " lead",
    "a  b .c",
]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def chunks(tokens, sizes):
    """Cut tokens into runs as verify steps would, sizes repeating."""
    sizes = itertools.cycle(sizes)
    place = 0
    while place < len(tokens):
        size = next(sizes)
        yield tokens[place : place + size]
        place += size


def decode(stops, tokens, sizes):
    """Feed runs until a string ends the answer; give its text and tokens."""
    answer, kept = stops.open(), 0
    for run in chunks(tokens, sizes):
        count = stops.feed(answer, run)
        kept += len(run) if count is None else count
        if count is not None:
            break
    return stops.close(answer), kept


@pytest.mark.parametrize("text", TEXTS)
def test_no_half_character_is_given_and_none_is_lost(text, tokenizer):
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokenizer.encode(text)]
    assert len(pieces) == len(text.encode())  # a token is a byte here
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.rest() == text


def test_bytes_that_never_become_a_character_are_given_at_the_end(tokenizer):
    stream = TextStream(tokenizer)
    given = [stream.add(token) for token in tokenizer.encode("a次")[:-1]]
    assert "".join(given) == "a"
    assert stream.rest() == "\ufffd"


def test_special_tokens_and_silent_ones_are_not_text(tokenizer):
    (silent,) = tokenizer.encode("z")
    stream = TextStream(tokenizer, frozenset([silent]))
    assert [stream.add(token) for token in tokenizer.encode("a<|im_end|>zb")] == ["a", "", "", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_give_the_text_that_decoding_them_at_once_gives(seed, tokenizer):
    # half of them text, half noise that makes no characters
    chance = random.Random(seed)
    noise = [chance.randrange(256) for _ in range(30)]
    text = tokenizer.encode("".join(chance.choice(TEXTS) for _ in range(4)))
    tokens = [token for pair in zip(text, noise, strict=False) for token in pair] + text
    stream = TextStream(tokenizer)
    streamed = "".join(stream.add(token) for token in tokens) + stream.rest()
    assert streamed == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_long_answer_is_not_decoded_again_and_again():
    class Counting:
        longest = 0

        def decode(self, ids, **options):
            self.longest = max(self.longest, len(ids))
            return "x" * len(ids)

    tokenizer = Counting()
    stream = TextStream(tokenizer)
    assert "".join(stream.add(1) for _ in range(300)) == "x" * 300
    assert tokenizer.longest == 2


@pytest.mark.parametrize(
    ("text", "strings", "kept_text", "num_bytes"),
    [
        ("one. two. three", ["two"], "one. ", 8),
        ("one. two. three", ["three", "o. "], "one. tw", 10),
        ("答えは次。終わり", ["次。"], "答えは", 15),
        ("aaab", ["ab"], "aa", 4),
        ("ababac", ["abac"], "ab", 6),
        ("xENDy", ["END", "ND"], "x", 4),
        ("xENDy", ["ND", "END"], "x", 4),
        ("STOP", ["STOP"], "", 4),
        ("nothing here", ["never"], "nothing here", 12),
        ("nothing here", [], "nothing here", 12),
    ],
)
@pytest.mark.parametrize("sizes", [[1], [2], [3, 1], [5], [100]])
def test_the_text_ends_before_the_string_however_tokens_come(
    text, strings, kept_text, num_bytes, sizes, tokenizer
):
    stops = StopStrings(tokenizer, strings)
    assert decode(stops, tokenizer.encode(text), sizes) == (kept_text, num_bytes)


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_any_size_end_at_the_token_that_single_tokens_end_at(seed, tokenizer):
    chance = random.Random(seed)
    alphabet = ["a", "b", "é", "次", "\n"]
    text = "".join(chance.choice(alphabet) for _ in range(60))
    strings = ["".join(chance.choice(alphabet) for _ in range(n)) for n in (2, 3, 4)]
    tokens = tokenizer.encode(text)
    stops = StopStrings(tokenizer, strings)
    plain = decode(stops, tokens, [1])
    sizes = [chance.randrange(1, 9) for _ in range(7)]
    assert decode(stops, tokens, sizes) == plain
    first = min((text.find(s) + len(s) for s in strings if s in text), default=None)
    ended = text if first is None else text[:first]
    assert plain[1] == len(ended.encode())
    assert plain[0] == ended[: min((ended.find(s) for s in strings if s in ended), default=None)]


@pytest.mark.parametrize("seed", range(10))
def test_what_a_reader_saw_is_never_taken_back(seed, tokenizer):
    chance = random.Random(seed)
    text = "".join(chance.choice("abé次") for _ in range(80))
    stops = StopStrings(tokenizer, ["abab", "次次a", "é" * 5])
    answer, seen = stops.open(), ""
    for token in tokenizer.encode(text):
        ended = stops.feed(answer, [token]) is not None
        assert stops.settled(answer).startswith(seen)
        seen = stops.settled(answer)
        if ended:
            break
    assert stops.close(answer).startswith(seen)


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizer):
    stops = StopStrings(tokenizer, ["\n\nUser:"])
    answer = stops.open()
    stops.feed(answer, tokenizer.encode("Hi\n"))
    assert stops.settled(answer) == "Hi"
    stops.feed(answer, tokenizer.encode("there"))
    assert stops.settled(answer) == "Hi\nthere"


def test_the_string_that_ended_an_answer_is_named(tokenizer):
    stops = StopStrings(tokenizer, ["x", "END"])
    answer = stops.open()
    assert stops.feed(answer, tokenizer.encode("the END.")) == 7
    assert (answer.text, answer.stop) == ("the ", "END")
    assert stops.text_of(tokenizer.encode("the END.")) == "the "


def test_answers_do_not_share_their_text(tokenizer):
    stops = StopStrings(tokenizer, ["ab"])
    one, two = stops.open(), stops.open()
    assert stops.feed(one, tokenizer.encode("a")) is None
    assert stops.feed(two, tokenizer.encode("b")) is None
    assert (one.text, two.text) == ("a", "b")


def test_an_empty_stop_string_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="an empty one would end every answer"):
        StopStrings(tokenizer, ["END", ""])
