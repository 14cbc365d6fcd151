import functools
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from draftlab.data.conversations import parse_record

CASES = Path(__file__).parent.parent / "cases"


@functools.cache
def _load(name):
    return AutoTokenizer.from_pretrained(CASES / name)


@pytest.fixture
def cases():
    return CASES


@pytest.fixture
def tokenizer_of():
    """Load a tokenizer of tests/cases; its template is put back after the test."""
    loaded = {}

    def load(name):
        tokenizer = _load(name)
        loaded.setdefault(name, (tokenizer, tokenizer.chat_template))
        return tokenizer

    yield load
    for tokenizer, template in loaded.values():
        tokenizer.chat_template = template


@pytest.fixture
def chats_of():
    """Read a jsonl of tests/cases into conversations by id."""

    def read(name):
        lines = (CASES / name).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        return {row["id"]: parse_record(row, source=row["id"], domain="d") for row in rows}

    return read


@pytest.fixture
def expected_of():
    return lambda name: json.loads((CASES / name).read_text(encoding="utf-8"))


@pytest.fixture
def learned_texts():
    """Decode what is learned, split at gaps."""

    def texts(tokenizer, rows):
        found = []
        for row in rows:
            spans, previous = [], False
            for token, learned in zip(row.ids, row.mask, strict=True):
                if learned and not previous:
                    spans.append([])
                if learned:
                    spans[-1].append(int(token))
                previous = bool(learned)
            found += [tokenizer.decode(span) for span in spans]
        return found

    return texts
