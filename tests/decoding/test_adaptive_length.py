"""Drafts cut by confidence, by cost, or left out for a while: exact as long as nobody looks ahead.

Power: at 1500 answers of three words a total variation of 0.1 is all but surely seen at 1e-6; the
anticipating variants below are the negative controls, and are seen.
"""

import pytest
import torch
from narrow import FALSE_ALARM, NUM_WORDS, SAMPLING, exact_law, narrow_target, p_value
from scripted import FakeClock, Markov, decode_settings

from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.decoder import Decoder
from draftlab.errors import ConfigError

SAMPLED = {"temperature": SAMPLING.temperature, "prefill_tokens": 8192, "batch_size": 500}
LAWS = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.3, 0.3, 0.2, 0.2], [0.05, 0.8, 0.1, 0.05], [0.25, 0.25, 0.25, 0.25]],
    dtype=torch.float64,
)
# the law looks uncertain in one way or another everywhere, so that some chains are cut


def own_probability(laws, tokens):
    """What must not be used: the drawn token's own probability."""
    return laws.gather(2, tokens.unsqueeze(2)).squeeze(2)


@pytest.fixture(scope="module")
def narrow():
    return narrow_target()


@pytest.fixture(scope="module")
def law(narrow):
    return exact_law(narrow)


@pytest.mark.parametrize("rule", ["speculative", "block", "sampled_verify"])
def test_chains_cut_by_the_laws_alone_keep_the_targets_law(narrow, law, rule):
    settings = decode_settings(**SAMPLED, min_confidence=0.5, rule=rule)
    assert p_value(Decoder(narrow, Markov(LAWS), settings), law) > FALSE_ALARM


def test_chains_cut_by_the_drawn_token_do_not(narrow, law):
    settings = decode_settings(**SAMPLED, min_confidence=0.5, rule="speculative")
    drafter = Markov(LAWS, tells=own_probability)
    assert p_value(Decoder(narrow, drafter, settings), law) < FALSE_ALARM


def test_the_length_chosen_by_cost_keeps_the_law(narrow, law):
    tree = {"kind": "budgeted", "max_nodes": 2, "top_k": 1, "depth": 2}
    decoder = Decoder(narrow, Markov(LAWS), decode_settings(**SAMPLED, tree=tree))
    decoder._curves = dict.fromkeys((32, 500), TimeCurve((1, 2, 3), (1.0, 1.4, 1.9)))
    drafted = set()
    assert p_value(decoder, law) > FALSE_ALARM
    for answer in decoder.generate([[3], [1], [0], [2]] * 8, max_new_tokens=3, batch_size=500):
        drafted |= {step.num_drafted for step in answer.steps}
    assert max(drafted) == 1  # two would not pay by this curve


def test_choosing_plain_rounds_by_the_past_keeps_the_law(narrow, law, monkeypatch):
    decoder = Decoder(
        narrow, Markov(LAWS), decode_settings(**SAMPLED, fallback=True), clock=FakeClock()
    )
    # rests after every round in which few drafts were accepted: as unfair as the past allows
    fallback = decoder._fallback
    monkeypatch.setattr(
        fallback,
        "note_drafted",
        lambda *, seconds, live, tokens: setattr(fallback, "_plain_rounds_left", int(tokens < 1.5)),
    )
    assert p_value(decoder, law) > FALSE_ALARM


def test_rows_are_cut_where_their_drafter_is_not_sure(target, prompts):
    laws = torch.zeros(320, 250, dtype=torch.float64)
    laws[:, 7] = 1.0
    tells = torch.tensor([0.9, 0.8, 0.3, 0.9])
    drafter = Markov(
        laws, 4, tells=lambda law, tokens: tells[: tokens.shape[1]].expand(tokens.shape)
    )
    for least, length in ((0.5, 2), (0.85, 1), (0.95, 0), (0.2, 4)):
        decoder = Decoder(target, drafter, decode_settings(min_confidence=least))
        (answer,) = decoder.generate(prompts[:1], max_new_tokens=8)
        assert {step.num_drafted for step in answer.steps[:2]} == {length}


def test_a_drafter_without_an_opinion_cannot_be_cut_by_it(target, prompts):
    from scripted import Scripted

    decoder = Decoder(
        target, Scripted(lambda prefix, depth: [1] * depth), decode_settings(min_confidence=0.5)
    )
    with pytest.raises(ConfigError, match="min_confidence has no effect with a scripted drafter"):
        decoder.generate(prompts[:1])


assert LAWS.shape == (NUM_WORDS, NUM_WORDS)
