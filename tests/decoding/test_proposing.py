"""How many draft nodes are verified, and which."""

import pytest
import torch
from scripted import FakeClock, ScriptedTree, decode_settings, perfect

from draftlab.decoding.costs import TimeCurve, doubling_widths, measure_time_curve
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.geometry import path_confidence, place_nodes
from draftlab.decoding.plan import make_plan, static_tree
from draftlab.drafters.tree import StaticTree
from draftlab.errors import ConfigError

#        anchor
#       0       1        confidence 0.9, 0.2
#     2   3     4                   0.8, 0.1, 0.9
#     5                             0.9
PARENTS, SURE = [-1, -1, 0, 0, 1, 2], [0.9, 0.2, 0.8, 0.1, 0.9, 0.9]
WHOLE = {"kind": "budgeted", "max_nodes": 6, "top_k": 2, "depth": 3}


@pytest.fixture(scope="module")
def plain(target, prompts):
    return Decoder(target, None, decode_settings(max_new_tokens=12)).generate(prompts)


@pytest.fixture(scope="module")
def drafter(prompts, plain):
    knows = perfect({tuple(p): list(g.output_ids) for p, g in zip(prompts, plain, strict=True)})

    def script(prefix, depth):
        true = [*knows(prefix, 3), 0, 0, 0]
        tokens = [true[0], 251, true[1], 252, 253, true[2]]
        return list(zip(tokens, PARENTS, SURE, strict=True))

    return ScriptedTree(script)


@pytest.mark.parametrize(
    ("per_node", "kept", "accepted"),
    [(0.0, 6, 3), (0.1, 3, 3), (0.5, 2, 2), (0.7, 1, 1), (5.0, 0, 0)],
)
def test_a_budgeted_tree_keeps_the_nodes_that_pay(
    target, prompts, plain, drafter, per_node, kept, accepted
):
    decoder = Decoder(target, drafter, decode_settings(tree=WHOLE, max_new_tokens=12))
    widths = tuple(range(1, 8))
    decoder._curves[1] = TimeCurve(widths, tuple(1 + per_node * (w - 1) for w in widths))
    (got,) = decoder.generate(prompts[:1], batch_size=1)
    assert got.output_ids == plain[0].output_ids
    assert got.steps[0].num_drafted == kept
    assert got.steps[0].num_accepted == accepted


def test_what_passes_cost_is_measured_once_before_the_first_round(
    target, prompts, drafter, monkeypatch
):
    clock, widths, run = FakeClock(), [], target.run

    def timed(kv, step, **rest):
        widths.append(step.ids.shape[1])
        clock.pass_time(1.0 + 0.5 * (step.ids.shape[1] > 4))
        return run(kv, step, **rest)

    monkeypatch.setattr(target, "run", timed)
    decoder = Decoder(target, drafter, decode_settings(tree=WHOLE), clock=clock)
    decoder.generate(prompts[:1], max_new_tokens=4, batch_size=1)
    assert widths[:16] == [1] * 4 + [2] * 4 + [4] * 4 + [7] * 4
    assert decoder._curves[1] == TimeCurve((1, 2, 4, 7), (1.0, 1.0, 1.0, 1.5))
    del widths[:]
    decoder.generate(prompts[:1], max_new_tokens=4, batch_size=1)
    assert len(widths) < 8


def test_a_curve_is_a_line_between_its_points_and_flat_outside():
    curve = TimeCurve((1, 4, 8), (1.0, 4.0, 5.0))
    assert [curve.at(w) for w in (1, 2, 4, 6, 8, 20)] == [1.0, 2.0, 4.0, 4.5, 5.0, 5.0]
    assert doubling_widths(1) == (1,)
    assert doubling_widths(8) == (1, 2, 4, 8)
    assert doubling_widths(11) == (1, 2, 4, 8, 11)


def test_noise_never_makes_a_wider_pass_cheaper(target, monkeypatch):
    clock, costs = FakeClock(), iter([9, 3, 3, 3, 9, 2, 2, 2])
    monkeypatch.setattr(target, "run", lambda kv, step: clock.pass_time(next(costs)))
    kv = target.open_kv(1, 8)
    curve = measure_time_curve(target, kv, rows=1, base=0, widths=(1, 2), clock=clock)
    assert curve.seconds == (3, 3)


def test_columns_see_their_ancestors_and_stand_at_their_depth():
    depths, sees = place_nodes(torch.tensor([PARENTS, [-1, 0, 1, 2, 3, 4]]))
    assert depths.tolist() == [[0, 1, 1, 2, 2, 2, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert sees[0, 6].nonzero().flatten().tolist() == [0, 1, 3, 6]
    assert sees[0, 5].nonzero().flatten().tolist() == [0, 2, 5]
    assert torch.equal(sees[1], torch.ones(7, 7, dtype=torch.bool).tril())


def test_a_path_is_never_surer_than_its_parents():
    generator = torch.Generator().manual_seed(0)
    parents = torch.stack([torch.randint(-1, n, (64,), generator=generator) for n in range(1, 30)])
    parents = parents.minimum(torch.arange(29).unsqueeze(1)).T.clone()
    parents = torch.minimum(parents, torch.arange(29) - 1)
    confidence = torch.rand(64, 29, generator=generator)
    path = path_confidence(parents, confidence, depth=29)
    above = path.gather(1, parents.clamp_min(0)).where(parents >= 0, torch.ones(()))
    assert (path <= above).all()
    assert torch.equal(path, above * confidence)


def test_static_trees_come_from_branches_or_from_a_file(target, drafter, tmp_path):
    tree = {"kind": "static", "shape": [2, 1]}
    plan = make_plan(decode_settings(tree=tree), drafter)
    assert (plan.depth, plan.num_nodes) == (2, 4)
    assert plan.shape == StaticTree((-1, -1, 0, 1), (0, 1, 0, 0))
    path = tmp_path / "t.json"
    path.write_text("[[1], [0, 0], [0]]")
    plan = make_plan(decode_settings(tree={"kind": "static", "shape": str(path)}), drafter)
    assert plan.shape == StaticTree((-1, -1, 0), (0, 1, 0))
    path.write_text("[[0, 0.5]]")
    with pytest.raises(ConfigError, match="expected lists of ranks"):
        make_plan(decode_settings(tree={"kind": "static", "shape": str(path)}), drafter)
    with pytest.raises(ConfigError, match=r"cannot read the tree nowhere\.json"):
        make_plan(decode_settings(tree={"kind": "static", "shape": "nowhere.json"}), drafter)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([[0], [0, 0, 0]], r"needs node \[0, 0\]"),
        ([[1]], r"needs node \[0\]"),
        ([[0], [0]], "each node once"),
        ([], "each node once"),
    ],
)
def test_a_tree_with_a_gap_is_refused(paths, words):
    with pytest.raises(ConfigError, match=words):
        static_tree(paths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tree": WHOLE, "num_draft_tokens": 3}, "num_draft_tokens=3 has no effect"),
        ({"tree": WHOLE, "min_confidence": 0.5}, "min_confidence=0.5 cuts chains"),
        ({"ignore_eos": True, "min_new_tokens": 2}, "min_new_tokens=2 has no effect"),
        ({"min_new_tokens": 30, "ignore_eos": False}, "min_new_tokens=30 exceeds"),
        ({"tree": {"kind": "bushy"}}, "tree"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        decode_settings(**changes)
