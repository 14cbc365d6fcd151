import json
import re
import unicodedata
from collections import Counter
from importlib.resources import files
from itertools import combinations

import pytest

from draftlab.data.conversations import Conversation
from draftlab.data.prompts import DOMAINS, load_prompts

SPLITS = ("train", "validation", "evaluation")
PAIRS = list(combinations(SPLITS, 2))
COUNTS = {"train": 192, "validation": 4, "evaluation": 12}


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[Conversation]]:
    return {split: load_prompts(split) for split in SPLITS}


@pytest.fixture(scope="module")
def everything(prompts) -> list[Conversation]:
    return [prompt for split in SPLITS for prompt in prompts[split]]


def _words(prompt: Conversation) -> list[str]:
    text = " ".join(message["content"] for message in prompt.messages)
    return re.findall(r"\w+", text.casefold())


def _word_runs(prompts: list[Conversation], length: int) -> set[tuple[str, ...]]:
    return {
        tuple(words[start : start + length])
        for words in map(_words, prompts)
        for start in range(len(words) - length + 1)
    }


def _turns(prompt: Conversation) -> tuple[tuple[str, str], ...]:
    return tuple((message["role"], message["content"]) for message in prompt.messages)


@pytest.mark.parametrize("split", SPLITS)
def test_domains_take_turns_and_each_has_its_number_of_prompts(prompts, split):
    assert [prompt.domain for prompt in prompts[split]] == list(DOMAINS) * COUNTS[split]


def test_ids_are_unique_and_name_split_and_domain(prompts):
    ids = [prompt.id for split in SPLITS for prompt in prompts[split]]
    assert len(set(ids)) == len(ids)
    for split in SPLITS:
        for prompt in prompts[split]:
            assert re.fullmatch(rf"{split}-{prompt.domain}-\d{{3}}", prompt.id)


def test_the_source_names_file_and_line(prompts):
    assert [prompt.source for prompt in prompts["evaluation"][:2]] == [
        "evaluation.jsonl:1",
        "evaluation.jsonl:2",
    ]


def test_turns_alternate_and_end_with_the_user(everything):
    for prompt in everything:
        roles = [message["role"] for message in prompt.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"], prompt.id


def test_every_turn_is_clean_text(everything):
    for prompt in everything:
        for message in prompt.messages:
            text = message["content"]
            assert text, prompt.id
            assert text == text.strip(), prompt.id
            assert unicodedata.is_normalized("NFC", text), prompt.id
            assert "\ufffd" not in text, prompt.id


def test_no_chat_is_there_twice(everything):
    assert [turns for turns, n in Counter(map(_turns, everything)).items() if n > 1] == []


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_no_message_stands_in_two_splits(prompts, one, other):
    texts = [
        {message["content"] for prompt in prompts[split] for message in prompt.messages}
        for split in (one, other)
    ]
    assert texts[0] & texts[1] == set()


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_splits_share_no_run_of_six_words(prompts, one, other):
    # a shared template or passage would show here
    assert _word_runs(prompts[one], 6) & _word_runs(prompts[other], 6) == set()


def test_the_first_prompts_of_a_domain_start_differently(prompts):
    for split in ("train", "evaluation"):
        for domain in DOMAINS:
            first = [prompt for prompt in prompts[split] if prompt.domain == domain][:4]
            assert len({_turns(prompt)[0][1][:40] for prompt in first}) == 4, (split, domain)


def test_some_prompts_bring_a_system_turn_and_some_an_earlier_answer(prompts):
    for split in SPLITS:
        roles = Counter(m["role"] for prompt in prompts[split] for m in prompt.messages)
        assert roles["system"] > 0
        assert roles["assistant"] > 0


def test_prompts_stay_short(everything):
    assert max(len(json.dumps(_turns(p), ensure_ascii=False)) for p in everything) < 1100


def test_the_files_are_small_and_hold_one_chat_a_line():
    folder = files("draftlab.data") / "written"
    texts = [(folder / f"{split}.jsonl").read_text(encoding="utf-8") for split in SPLITS]
    assert sum(len(text.encode()) for text in texts) < 1_000_000
    for text in texts:
        assert text.endswith("}\n")
        for line in text.removesuffix("\n").split("\n"):
            assert json.loads(line).keys() == {"id", "domain", "messages"}
