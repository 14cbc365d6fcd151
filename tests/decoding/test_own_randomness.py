"""Decoding draws only numbers of its own naming: not one from a global generator."""

import numpy as np
import pytest
import torch
from scripted import decode_settings

from draftlab.decoding.decoder import Decoder
from draftlab.drafters.base import drafter_class

RULES = ["speculative", "sampled_verify"]


def states():
    # Python's own generator is not asked: the type checker of the tests draws from it
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


def ngram(target):
    kind = drafter_class("ngram")
    settings = kind.settings_class(kind="ngram", num_draft_tokens=3, max_ngram=2, min_ngram=1)
    return kind(settings, target.view)


def decode(target, prompts, rule):
    settings = decode_settings(rule=rule, temperature=1.0, max_new_tokens=12)
    answers = Decoder(target, ngram(target), settings).generate(prompts, batch_size=3)
    return [answer.output_ids for answer in answers]


@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_decode_leaves_every_global_generator_as_it_was(target, prompts, rule):
    before = states()
    decode(target, prompts, rule)
    assert states() == before


@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_decode_does_not_depend_on_any_global_generator(target, prompts, rule):
    first = decode(target, prompts, rule)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12345)
        assert decode(target, prompts, rule) == first
