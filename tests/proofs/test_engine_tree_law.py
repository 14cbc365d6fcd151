"""The whole engine with grown trees, over every draw: whole answers have the target's law.

Dynamic trees grow where the drafter is sure, budgeted ones are cut by what passes cost, measured
ones have the shape that counts say is best. Exact up to float64, so there is no power to state; each
claim has a broken twin that must fail.
"""

import pytest
import torch
from contract_kit import make

import draftlab.decoding.rules.speculative as tree_rules
from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.proposing import Proposer
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.errors import ConfigError
from draftlab.randomness import Purpose
from proofs.drafters import FiveWords
from proofs.enumeration import Enumeration, distance, engine_law, middles
from proofs.five_words import EOS, Words, five_word_target
from proofs.grown_trees import ChosenLengths, CutByDraws, Grower, GrownTrees, settings_for
from proofs.samplings import SAMPLINGS, SEEN, TOLERANCE

DYNAMIC = {"kind": "dynamic", "num_nodes": 5, "top_k": 2, "depth": 3}
BUDGETED = {"kind": "budgeted", "max_nodes": 5, "top_k": 2, "depth": 3}
CHOSEN = {"kind": "budgeted", "max_nodes": 2, "top_k": 1, "depth": 2}
MEASURED = {"kind": "measured", "num_nodes": 4}
SHAPE = DynamicTree(num_nodes=5, top_k=2, depth=3)
# of a pass over 1, 2, ... tokens: so steep that where the drafter is unsure less of it is verified
SECONDS = {
    "five words": (1.0, 1.45, 1.65, 1.75, 1.9, 2.05),
    "medusa": (1.0, 1.5, 1.6, 1.7, 1.8, 1.9),
    "eagle3": (1.0, 1.45, 1.55, 1.75, 1.8, 2.0),
}
CHAIN_SECONDS = (1.0, 1.65, 1.9)
TWO_OR_NONE = (1.0, 2.0, 2.2)  # one node never pays, and two do where the second is sure
DRAFTERS = ("five words", "medusa", "eagle3")
LENGTH = 4
# 100 answers were looked at: how often choice 0, 1, 2 of head 0, 1, 2 was right
RANK_HITS = ((60, 30, 10), (50, 20, 5), (40, 10, 5))
BEST_OF_THEM = StaticTree(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
POINTS, WITHOUT_REPLACEMENT = "point_mass", "without_replacement"


@pytest.fixture(scope="module")
def target():
    return five_word_target()


def drafter_of(name, target):
    if name == "five words":
        return Grower(3, (0, 2, EOS))
    drafter = make(name, target)
    if name == "medusa":
        for head, hits in enumerate(RANK_HITS):
            drafter.rank_hits[head, : len(hits)] = torch.tensor(hits)
            drafter.rank_hits[head, -1] = 100
    return drafter


def run(monkeypatch, decoder, plan, length=LENGTH):
    """Give the engine's distance from the target's law, and the verify steps of all answers."""
    rows = list(plan.rows())
    assert sum(mass for _, mass in rows) == pytest.approx(1, abs=1e-12)
    law, answers = engine_law(monkeypatch, decoder, rows, length)
    steps = [step for answer in answers for step in answer.steps]
    return distance(law, plan.words.joint()), steps


def run_dynamic(monkeypatch, target, drafter, sampling):
    plan = GrownTrees(Words(target, sampling, LENGTH + 1), drafter, "points", 3, SHAPE)
    decoder = Decoder(target, drafter, settings_for(sampling, rule=POINTS, tree=DYNAMIC))
    return run(monkeypatch, decoder, plan, LENGTH + 1)


def run_budgeted(monkeypatch, target, drafter, sampling, seconds=SECONDS["five words"]):
    """Answer row by row: rows of one batch share the size that pays, and so would need each other."""
    words = Words(target, sampling, LENGTH)
    plan = GrownTrees(words, drafter, "points", 3, SHAPE, 0.0, seconds=seconds)
    settings = settings_for(sampling, rule=POINTS, tree=BUDGETED, batch_size=1)
    decoder = Decoder(target, drafter, settings)
    decoder._curves[1] = TimeCurve((1, 2, 3, 4, 5, 6), seconds)
    return run(monkeypatch, decoder, plan)


def run_chosen(
    monkeypatch, target, drafter, sampling, rule, seconds=CHAIN_SECONDS, *, looks_ahead=False
):
    judge = {"speculative": "token", "block": "block", POINTS: "points"}[rule]
    words = Words(target, sampling, LENGTH)
    plan = ChosenLengths(
        words, drafter, judge, 2, None, 0.0, seconds=seconds, looks_ahead=looks_ahead
    )
    decoder = Decoder(target, drafter, settings_for(sampling, rule=rule, tree=CHOSEN, batch_size=1))
    decoder._curves[1] = TimeCurve((1, 2, 3), seconds)
    return run(monkeypatch, decoder, plan)


def run_measured(monkeypatch, target, sampling, rule, length=3):
    drafter = drafter_of("medusa", target)
    decoder = Decoder(target, drafter, settings_for(sampling, rule=rule, tree=MEASURED))
    assert decoder.plan.shape == BEST_OF_THEM
    judge = "points" if rule == POINTS else "token"
    plan = Enumeration(Words(target, sampling, length), drafter, judge, 3, BEST_OF_THEM)
    return run(monkeypatch, decoder, plan, length)


def cases(choices, fast="penalties"):
    """Cross choices with samplings; row by row they take seconds each, so few are fast."""
    return [
        pytest.param(choice, name, marks=[pytest.mark.slow] * (name != fast))
        for choice in choices
        for name in SAMPLINGS
    ]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_tree_grown_where_the_drafter_is_sure_keeps_the_law(monkeypatch, target, kind, name):
    off, steps = run_dynamic(monkeypatch, target, drafter_of(kind, target), SAMPLINGS[name])
    assert off < TOLERANCE
    assert {step.num_accepted for step in steps} >= {0, 1, 2}
    # an accepted run with an end token inside was cut there
    assert any(step.num_emitted < step.num_accepted + 1 for step in steps)


@pytest.mark.parametrize(("kind", "name"), cases(DRAFTERS))
def test_a_tree_cut_by_what_passes_cost_keeps_the_law(monkeypatch, target, kind, name):
    drafter = drafter_of(kind, target)
    off, steps = run_budgeted(monkeypatch, target, drafter, SAMPLINGS[name], SECONDS[kind])
    assert off < TOLERANCE
    assert len({step.num_drafted for step in steps} - {0}) >= 2
    assert {step.num_accepted for step in steps} >= {0, 1}


@pytest.mark.parametrize(("rule", "name"), cases(["speculative", "block", POINTS]))
def test_a_chain_as_long_as_pays_keeps_the_law(monkeypatch, target, rule, name):
    drafter = FiveWords(2, (0, EOS))
    off, steps = run_chosen(monkeypatch, target, drafter, SAMPLINGS[name], rule)
    assert off < TOLERANCE
    assert {step.num_drafted for step in steps} == {0, 1, 2}


@pytest.mark.parametrize(("rule", "name"), cases([WITHOUT_REPLACEMENT, POINTS]))
def test_the_tree_that_counts_say_is_best_keeps_the_law(monkeypatch, target, rule, name):
    off, steps = run_measured(monkeypatch, target, SAMPLINGS[name], rule)
    assert off < TOLERANCE
    assert {step.num_accepted for step in steps} >= {0, 1, 2}


@pytest.mark.slow
def test_it_keeps_the_law_over_several_rounds(monkeypatch, target):
    rule, sampling = WITHOUT_REPLACEMENT, SAMPLINGS["top-k"]
    off, steps = run_measured(monkeypatch, target, sampling, rule, LENGTH)
    assert off < TOLERANCE
    assert len(steps) > 100_000


@pytest.mark.parametrize("tree", [DYNAMIC, BUDGETED])
def test_with_sampled_verify_the_text_is_that_of_plain_sampling(monkeypatch, target, tree):
    words = Words(target, SAMPLINGS["penalties"], LENGTH)

    def places(answer=(), draws=(), mass=1.0):
        if words.is_over(answer):
            yield draws, mass
            return
        for word, u, piece in middles(words.p(answer)):
            place = ((len(answer), Purpose.SAMPLE, 0), u)
            yield from places((*answer, word), (*draws, place), mass * piece)

    rows = list(places())
    settings = settings_for(words.sampling, rule="sampled_verify", tree=tree)
    decoder = Decoder(target, Grower(3, (0, 2, EOS)), settings)
    decoder._curves[len(rows)] = TimeCurve((1, 2, 3, 4, 5, 6), SECONDS["five words"])
    law, answers = engine_law(monkeypatch, decoder, rows, LENGTH)
    assert distance(law, words.joint()) < TOLERANCE
    assert {step.num_accepted for answer in answers for step in answer.steps} >= {0, 1}
    _, plain = engine_law(monkeypatch, Decoder(target, None, settings), rows, LENGTH)
    assert [a.output_ids for a in answers] == [a.output_ids for a in plain]


# ------------------------------------------------------------------ what must fail


@pytest.mark.parametrize("tree", [DYNAMIC, BUDGETED])
def test_a_tree_whose_shape_follows_from_its_nodes_is_never_drawn(target, tree):
    settings = settings_for(SAMPLINGS["top-k"], rule=WITHOUT_REPLACEMENT, tree=tree)
    with pytest.raises(ConfigError, match="without_replacement is for trees whose siblings"):
        Decoder(target, Grower(3, (0, 2, EOS)), settings)


@pytest.mark.parametrize(("kind", "is_kept"), [(Grower, True), (CutByDraws, False)])
def test_counting_a_drawn_node_by_the_token_it_became_is_seen(monkeypatch, target, kind, is_kept):
    drafter, sampling = kind(2, (0, 2, EOS)), SAMPLINGS["top-k"]
    shape = StaticTree(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
    plan = Enumeration(Words(target, sampling, 3), drafter, "token", 2, shape)
    tree = {"kind": "static", "shape": [2, 1]}
    settings = settings_for(sampling, rule=WITHOUT_REPLACEMENT, tree=tree)
    off, _ = run(monkeypatch, Decoder(target, drafter, settings), plan, 3)
    assert (off < TOLERANCE) == is_kept
    assert (off > SEEN) != is_kept


@pytest.mark.parametrize("way", ["dynamic", "budgeted", POINTS, WITHOUT_REPLACEMENT])
def test_a_rejected_sibling_that_stays_in_what_is_left_of_p_is_seen(monkeypatch, target, way):
    monkeypatch.setattr(tree_rules, "_without", lambda tree, node, p, mass, rejected: (p, mass))
    sampling = SAMPLINGS["top-k"]
    if way in ("dynamic", "budgeted"):
        runs = run_dynamic if way == "dynamic" else run_budgeted
        off, _ = runs(monkeypatch, target, drafter_of("five words", target), sampling)
    else:
        off, _ = run_measured(monkeypatch, target, sampling, way)
    assert off > SEEN


@pytest.mark.parametrize("rule", ["speculative", pytest.param("block", marks=pytest.mark.slow)])
def test_a_drawn_chain_whose_length_is_chosen_by_what_lies_behind_it_is_seen(
    monkeypatch, target, rule
):
    honest = Proposer._best_size

    def looking(self, path, *, may_look_ahead):
        return honest(self, path, may_look_ahead=True)

    monkeypatch.setattr(Proposer, "_best_size", looking)
    drafter, sampling = FiveWords(2, (0, EOS)), SAMPLINGS["penalties"]
    off, _ = run_chosen(monkeypatch, target, drafter, sampling, rule, TWO_OR_NONE, looks_ahead=True)
    assert off > SEEN
