"""Every drafter up to the last position of its target, at every draft length, ragged."""

import pytest
from contract_kit import CASES, KINDS, K, make, some_ids
from scripted import decode_settings

from draftlab.decoding.decoder import Decoder
from draftlab.targets.tiny import tiny_target

MOST = 40
PROMPTS = [some_ids(n, seed=n) for n in range(MOST - 2 * K - 2, MOST)]


@pytest.fixture(scope="module")
def target():
    return tiny_target(max_position_embeddings=MOST, num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(target):
    settings = decode_settings(max_new_tokens=100)
    found = Decoder(target, None, settings).generate(PROMPTS, batch_size=1)
    assert [len(g.output_ids) for g in found] == [MOST - len(p) for p in PROMPTS]
    return [g.output_ids for g in found]


def ends_exactly(target, plain, case, depth):
    settings = decode_settings(max_new_tokens=100, num_draft_tokens=depth, prefill_tokens=64)
    found = Decoder(target, make(case, target), settings).generate(PROMPTS, batch_size=4)
    assert [g.output_ids for g in found] == plain


@pytest.mark.parametrize("case", KINDS)
def test_answers_reach_the_last_position(target, plain, case):
    ends_exactly(target, plain, case, K)


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(1, K))
@pytest.mark.parametrize("case", CASES)
def test_answers_reach_the_last_position_at_every_draft_length(target, plain, case, depth):
    ends_exactly(target, plain, case, depth)


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, MOST))
@pytest.mark.parametrize("case", ["draft_model", "eagle3", "medusa", "ngram", "self_speculative"])
def test_a_prompt_of_every_length_is_answered_to_the_end(target, case, length):
    prompt = [some_ids(length, seed=length)]
    settings = decode_settings(max_new_tokens=100, num_draft_tokens=K, prefill_tokens=7)
    (plain,) = Decoder(target, None, settings).generate(prompt)
    (found,) = Decoder(target, make(case, target), settings).generate(prompt)
    assert found.output_ids == plain.output_ids
    assert len(found.output_ids) == MOST - length
