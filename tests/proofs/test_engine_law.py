"""The whole engine over every draw of two to four rounds: whole answers have the target's law.

Exact up to float64, so there is no power to state; each claim has a broken twin that must fail.
"""

from dataclasses import replace

import pytest
import torch
from contract_kit import make
from scripted import decode_settings

import draftlab.decoding.rules.chain as chain_rules
from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.decoder import Decoder
from draftlab.drafters.tree import StaticTree
from draftlab.randomness import Purpose
from draftlab.sampling import ContextTracker, Sampling
from proofs.drafters import FiveWords, LooksAhead, Sharpened, SureOfTheSecond
from proofs.enumeration import SEED, Enumeration, distance, engine_law, middles
from proofs.five_words import EOS, Words, five_word_target
from proofs.samplings import SAMPLINGS, SEEN, TOLERANCE

# words the drafter can say; some of them the target cannot, and the other way round
SUPPORTS = {"top-k": (0, EOS), "penalties": (0, EOS), "no early end": (2, EOS)}
FORK = {"kind": "static", "shape": [2, 1]}
FORK_SHAPE = StaticTree(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
# name: decode keys, judge, drafter's words, tree
WAYS = {
    "speculative": ({"rule": "speculative"}, "token"),
    "block": ({"rule": "block"}, "block"),
    "points": ({"rule": "point_mass"}, "points"),
    "speculative, cut where unsure": ({"rule": "speculative", "min_confidence": 0.6}, "token"),
    "block, cut where unsure": ({"rule": "block", "min_confidence": 0.6}, "block"),
    "tree without replacement": ({"rule": "without_replacement", "tree": FORK}, "token"),
    "tree of points": ({"rule": "point_mass", "tree": FORK}, "points"),
}
LARGE = (
    "tree without replacement",
    "speculative, cut where unsure",
    "block, cut where unsure",
)


@pytest.fixture(scope="module")
def target():
    return five_word_target()


@pytest.fixture(scope="module")
def deeper():
    return five_word_target(num_hidden_layers=4)


def settings_for(sampling, **changes):
    return decode_settings(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_new_tokens=sampling.min_new_tokens,
        ignore_eos=False,
        seed=SEED,
        batch_size=20_000,
        prefill_tokens=100_000,
        **changes,
    )


def total_variation(monkeypatch, target, drafter, way, sampling, length=4, depth=2):
    """Give the engine's distance from the target's law, and the answers."""
    keys, judge = WAYS[way]
    shape = FORK_SHAPE if "tree" in keys else None
    words = Words(target, sampling, length)
    plan = Enumeration(words, drafter, judge, depth, shape, keys.get("min_confidence"))
    rows = list(plan.rows())
    assert sum(mass for _, mass in rows) == pytest.approx(1, abs=1e-12)
    depths = {} if shape else {"num_draft_tokens": depth}
    decoder = Decoder(target, drafter, settings_for(sampling, **keys, **depths))
    law, answers = engine_law(monkeypatch, decoder, rows, length)
    return distance(law, words.joint()), answers


CASES = [
    # the largest of them, seconds each
    pytest.param(way, name, marks=[pytest.mark.slow] * (way in LARGE and name != "penalties"))
    for way in WAYS
    for name in SAMPLINGS
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_whole_answers_have_the_targets_law(monkeypatch, target, way, name):
    drafter = FiveWords(2, SUPPORTS[name])
    off, answers = total_variation(monkeypatch, target, drafter, way, SAMPLINGS[name])
    assert off < TOLERANCE
    steps = [step for answer in answers for step in answer.steps]
    assert {step.num_accepted for step in steps} >= {0, 1, 2}
    assert max(len(answer.steps) for answer in answers) >= 2
    # an accepted run with an end token inside was cut there
    assert any(s.num_emitted < s.num_accepted + 1 for s in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["speculative", "block, cut where unsure"])
def test_longer_answers_have_it_as_well(monkeypatch, target, way):
    drafter = FiveWords(3, (0, EOS))
    off, _ = total_variation(monkeypatch, target, drafter, way, SAMPLINGS["top-k"], 5, depth=3)
    assert off < TOLERANCE


@pytest.mark.parametrize("name", ["top-k", "penalties"])
def test_sampled_verify_puts_out_what_plain_sampling_draws_whatever_is_drafted(
    monkeypatch, target, name
):
    words = Words(target, SAMPLINGS[name], 4)

    def places(answer=(), draws=(), mass=1.0):
        if words.is_over(answer):
            yield draws, mass
            return
        for word, u, piece in middles(words.p(answer)):
            place = ((len(answer), Purpose.SAMPLE, 0), u)
            yield from places((*answer, word), (*draws, place), mass * piece)

    # each way the target's draws can fall, several times with other drafts
    rows = [(draws, mass / 8) for draws, mass in places() for _ in range(8)]
    settings = settings_for(SAMPLINGS[name], rule="sampled_verify", num_draft_tokens=2)
    drafter = FiveWords(2, SUPPORTS[name])
    law, answers = engine_law(monkeypatch, Decoder(target, drafter, settings), rows, 4)
    assert distance(law, words.joint()) < TOLERANCE
    assert {step.num_accepted for answer in answers for step in answer.steps} == {0, 1, 2}
    # and row by row, not only on the whole
    plain, _ = engine_law(monkeypatch, Decoder(target, None, settings), rows, 4)
    assert plain.keys() == law.keys()
    for start in range(0, len(rows), 8):
        assert len({answer.output_ids for answer in answers[start : start + 8]}) == 1


@pytest.mark.parametrize("way", ["speculative", "block", "tree without replacement"])
def test_a_law_over_all_words_is_kept_as_well(monkeypatch, target, way):
    sampling = Sampling(temperature=2.0)
    off, _ = total_variation(monkeypatch, target, FiveWords(2, (1, 3)), way, sampling, length=3)
    assert off < TOLERANCE


@pytest.mark.parametrize("way", ["speculative", "block"])
@pytest.mark.parametrize("case", ["draft_model", "eagle3", "medusa", "self_speculative"])
def test_drafters_of_the_house_keep_the_law_with_what_they_remember(
    monkeypatch, target, deeper, case, way
):
    """Their drafts are foretold after a fresh prefill; in the engine they follow from rounds."""
    sampling = Sampling(temperature=1.3, top_k=2)
    if case == "self_speculative":
        target, sampling = deeper, Sampling(temperature=2.0, top_k=3)
    drafter = make(case, target)
    off, answers = total_variation(monkeypatch, target, drafter, way, sampling)
    assert off < TOLERANCE
    assert {step.num_accepted for answer in answers for step in answer.steps} >= {0, 1, 2}


# ------------------------------------------------------------------ what must fail


@pytest.mark.parametrize("way", ["speculative", "block", "tree without replacement"])
def test_a_drafter_that_tells_another_law_than_it_drew_from_is_seen(monkeypatch, target, way):
    drafter = Sharpened(2, SUPPORTS["top-k"])
    off, _ = total_variation(monkeypatch, target, drafter, way, SAMPLINGS["top-k"], length=3)
    assert off > SEEN


@pytest.mark.parametrize("way", ["speculative, cut where unsure", "block, cut where unsure"])
def test_cutting_a_draft_by_the_token_just_drawn_is_seen(monkeypatch, target, way):
    drafter = LooksAhead(2, SUPPORTS["top-k"])
    off, _ = total_variation(monkeypatch, target, drafter, way, SAMPLINGS["top-k"])
    assert off > SEEN


def test_a_correction_drawn_from_p_itself_is_seen(monkeypatch, target):
    monkeypatch.setattr(chain_rules, "residual", lambda p, q: p)
    drafter = FiveWords(2, SUPPORTS["top-k"])
    off, _ = total_variation(monkeypatch, target, drafter, "speculative", SAMPLINGS["top-k"])
    assert off > SEEN


def test_penalties_that_do_not_see_the_drafts_before_them_are_seen(monkeypatch, target):
    honest = ContextTracker.at

    def lagging(self, rows, node_tokens=None, parents=None):
        context = honest(self, rows, node_tokens, parents)
        return replace(context, sees=torch.zeros_like(context.sees))

    monkeypatch.setattr(ContextTracker, "at", lagging)
    drafter = FiveWords(2, SUPPORTS["penalties"])
    off, _ = total_variation(monkeypatch, target, drafter, "speculative", SAMPLINGS["penalties"])
    assert off > SEEN


@pytest.mark.parametrize(("rule", "longest"), [("speculative", 0), ("block", 0), ("point_mass", 2)])
def test_a_drawn_chains_length_is_chosen_without_a_look_behind_its_end(target, rule, longest):
    """One node does not pay and two would: how sure the second is depends on the first's draw."""
    tree = {"kind": "budgeted", "max_nodes": 2, "top_k": 1, "depth": 2}
    settings = settings_for(SAMPLINGS["top-k"], rule=rule, tree=tree)
    decoder = Decoder(target, SureOfTheSecond(2), settings)
    decoder._curves[1] = TimeCurve((1, 2, 3), (1.0, 1.6, 1.7))
    answers = [decoder.generate([[1, word]], max_new_tokens=6)[0] for word in range(4)]
    assert max(step.num_drafted for answer in answers for step in answer.steps) == longest
