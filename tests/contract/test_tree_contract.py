"""Trees of every drafter that grows them: well formed, and the decoder's output the target's own."""

import dataclasses

import pytest
import torch
from contract_kit import CASES, KINDS, K, Session, make, settings_of, some_ids
from test_lossless_decoding import (
    FALSE_ALARM,
    answers,
    exact_law,
    narrow_target,
    p_value,
    target,
)

from draftlab.drafters.base import DraftBudget, drafter_class
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.randomness import uniforms
from draftlab.sampling import GREEDY, Sampling

__all__ = ["exact_law", "narrow_target", "target"]  # fixtures

GROWING = [case for case in CASES if drafter_class(settings_of(case).kind).grows_trees]
COPIES = {"suffix"}  # kinds that never draw, and leave nodes open where nothing was seen before
SAMPLED = Sampling(temperature=1.0)
STATIC = StaticTree(parents=(-1, -1, 0, 0, 1, 2), ranks=(0, 1, 0, 1, 0, 0))
DYNAMIC = DynamicTree(num_nodes=7, top_k=3, depth=3)
STATIC_WORDS = {"kind": "static", "shape": [2, 2, 1]}
DYNAMIC_WORDS = {"kind": "dynamic", "num_nodes": 7, "top_k": 3, "depth": 3}
SHAPES = pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])


def propose(session, rows, shape, sampling, points=False):
    count = len(shape.parents) if isinstance(shape, StaticTree) else shape.num_nodes
    draws = uniforms(7, torch.tensor(rows).unsqueeze(1), torch.arange(count))
    budget = DraftBudget(torch.tensor(rows), K, sampling, points=points, tree=shape)
    with torch.inference_mode():
        return session.drafter.propose(session.state, budget, draws)


def test_some_kinds_grow_trees():
    assert {"eagle", "eagle3", "medusa"} <= set(GROWING)


@SHAPES
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", GROWING)
def test_trees_are_well_formed_also_for_rows_that_hold_nothing(target, case, sampling, shape):
    session = Session(target, make(case, target), slots=3)
    session.show(1, some_ids(9), anchor=some_ids(10)[-1])
    tree = propose(session, [2, 1, 0], shape, sampling)
    count = int(tree.num_nodes[1])
    assert tree.num_nodes.tolist() == [0, count, 0]
    assert tree.tokens.shape[1] == (6 if shape is STATIC else 7)
    is_full = count == tree.tokens.shape[1]
    assert is_full or session.drafter.kind in COPIES
    assert (tree.parents < torch.arange(tree.parents.shape[1])).all()
    assert (tree.parents >= -1).all()
    assert ((tree.tokens >= 0) & (tree.tokens < target.spec.num_token_ids)).all()
    siblings = list(zip(tree.parents[1].tolist(), tree.tokens[1].tolist(), strict=True))[:count]
    assert len(set(siblings)) == count
    if shape is STATIC and is_full:
        assert tree.parents.tolist() == [list(STATIC.parents)] * 3
    for node in range(count):
        law = tree.law_probs[1, node]
        assert torch.isclose(law.sum(), torch.ones((), dtype=law.dtype), atol=1e-5)
        ids = torch.arange(law.shape[0]) if tree.law_ids is None else tree.law_ids[1, node]
        assert ids.unique().numel() == ids.numel()
        assert law[ids == tree.tokens[1, node]].item() > 0
        for parent, token in siblings[:node]:
            if parent == tree.parents[1, node] and law.shape[0] > 1:
                assert law[ids == token].sum() == 0  # an earlier sibling cannot be drawn again


@pytest.mark.parametrize("case", GROWING)
def test_confidence_is_known_before_anything_is_drawn(target, case):
    session = Session(target, make(case, target))
    session.show(0, some_ids(9), anchor=some_ids(10)[-1])
    roots = [node for node, parent in enumerate(STATIC.parents) if parent < 0]
    told = []
    for row in (0, 5):  # other uniforms
        draws = uniforms(row, torch.arange(1).unsqueeze(1), torch.arange(6))
        budget = DraftBudget(torch.tensor([0]), K, SAMPLED, tree=STATIC, min_confidence=0.0)
        with torch.inference_mode():
            tree = session.drafter.propose(session.state, budget, draws)
        assert tree.confidence is not None
        assert ((tree.confidence >= 0) & (tree.confidence <= 1)).all()
        told.append(tree)
    assert session.drafter.kind in COPIES or not told[0].tokens.equal(told[1].tokens)
    assert torch.allclose(told[0].confidence[:, roots], told[1].confidence[:, roots])


@pytest.mark.parametrize("case", GROWING)
def test_greedy_trees_equal_autoregressive_token_for_token(target, case):
    expected = answers(target, None)
    drafter = make(case, target)
    for words in (DYNAMIC_WORDS, STATIC_WORDS) if case in KINDS else (DYNAMIC_WORDS,):
        assert answers(target, drafter, tree=words, num_draft_tokens=None) == expected


@pytest.mark.parametrize("case", [case for case in GROWING if case in KINDS])
def test_drawn_trees_follow_the_exact_law(narrow_target, exact_law, case):
    drafter = make(case, narrow_target)
    tree = {"tree": STATIC_WORDS, "num_draft_tokens": None}
    assert p_value(narrow_target, drafter, exact_law, **tree) > FALSE_ALARM


@pytest.mark.parametrize("case", ["eagle3", "medusa"])
def test_grown_trees_follow_the_exact_law(narrow_target, exact_law, case):
    drafter = make(case, narrow_target)
    tree = {"tree": DYNAMIC_WORDS, "num_draft_tokens": None}
    assert p_value(narrow_target, drafter, exact_law, **tree) > FALSE_ALARM


def test_a_tree_drawn_at_another_temperature_than_it_tells_fails_the_same_test(
    narrow_target, exact_law, monkeypatch
):
    """The negative control (case O-29): drawn one way, accepted as if drawn another."""
    drafter = make("medusa", narrow_target)
    honest = drafter.propose

    def propose_wrongly(state, budget, draws):
        tree = honest(state, budget, draws)
        sharper = tree.law_probs**4
        return dataclasses.replace(tree, law_probs=sharper / sharper.sum(-1, keepdim=True))

    monkeypatch.setattr(drafter, "propose", propose_wrongly)
    tree = {"tree": STATIC_WORDS, "num_draft_tokens": None}
    assert p_value(narrow_target, drafter, exact_law, **tree) < FALSE_ALARM
