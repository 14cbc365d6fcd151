"""Trees grown over a made-up draft law, against brute force."""

import itertools

import pytest
import torch
from scipy import stats

from draftlab.drafters._growth import (
    best_static_tree,
    grow,
    grow_dynamic,
    grow_static,
    grow_static_drawn,
    num_expanded,
    num_levels,
)
from draftlab.drafters.base import DraftBudget
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.errors import ConfigError
from draftlab.randomness import derive_seed, uniforms
from draftlab.sampling import GREEDY, Sampling

COLUMNS = 6
BUSHY = StaticTree(parents=(-1, -1, 0, 0, 1, 2, 2, 4), ranks=(0, 2, 0, 1, 0, 0, 1, 0))


class ByPath:
    """A draft law of every path of every row; keeps book of what `expand` is asked."""

    def __init__(self, rows, columns=COLUMNS, equal=False):
        self.rows, self.columns, self.equal = rows, columns, equal
        self.newest = [[()] for _ in range(rows)]

    def logits(self, row, path):
        if self.equal:
            return torch.zeros(self.columns, dtype=torch.float64)
        seed = derive_seed("path", row, *path)
        noise = torch.randn(self.columns, generator=torch.Generator().manual_seed(seed))
        return 2 * noise.double()

    def law(self, row, path):
        return self.logits(row, path).softmax(-1)

    def first(self):
        return torch.stack([self.logits(row, ()) for row in range(self.rows)])

    def expand(self, columns, parents):
        for row in range(self.rows):
            pairs = zip(columns[row].tolist(), parents[row].tolist(), strict=True)
            self.newest[row] = [(*self.newest[row][parent], column) for column, parent in pairs]
        return torch.stack(
            [
                torch.stack([self.logits(row, path) for path in self.newest[row]])
                for row in range(self.rows)
            ]
        )


def paths_of(grown, row):
    paths = []
    for column, parent in zip(
        grown.columns[row].tolist(), grown.parents[row].tolist(), strict=True
    ):
        paths.append((*(() if parent < 0 else paths[parent]), column))
    return paths


def expanded_by_hand(source, row, shape):
    """EAGLE-2 word by word: (value, path) of the nodes that stay, in order of creation."""
    pool, beams = [], [(1.0, ())]
    for _ in range(shape.depth):
        level = []
        for value, path in beams:
            law = source.law(row, path)
            for column in law.argsort(descending=True)[: shape.top_k].tolist():
                level.append((value * law[column].item(), (*path, column)))
        pool += level
        beams = sorted(level, key=lambda node: -node[0])[: shape.top_k]
    best = sorted(pool, key=lambda node: -node[0])[: shape.num_nodes]
    return [node for node in pool if node in best]


@pytest.mark.parametrize(
    "shape",
    [
        DynamicTree(num_nodes=10, top_k=3, depth=4),
        DynamicTree(num_nodes=4, top_k=2, depth=5),
        DynamicTree(num_nodes=3, top_k=6, depth=1),
        DynamicTree(num_nodes=100, top_k=2, depth=3),
        DynamicTree(num_nodes=5, top_k=1, depth=5),
    ],
)
def test_a_dynamic_tree_is_what_eagle_2_describes(shape):
    source = ByPath(rows=4)
    grown = grow_dynamic(shape, source.first(), source.expand, temperature=1.0)
    for row in range(4):
        expected = expanded_by_hand(source, row, shape)
        assert paths_of(grown, row) == [path for _, path in expected]
        for node, (_, path) in enumerate(expected):
            own = source.law(row, path[:-1])[path[-1]]
            assert torch.isclose(grown.confidence[row, node], own, rtol=1e-12)


def test_ties_keep_a_dynamic_tree_connected():
    source = ByPath(rows=2, equal=True)
    shape = DynamicTree(num_nodes=7, top_k=3, depth=4)
    grown = grow_dynamic(shape, source.first(), source.expand, temperature=1.0)
    assert grown.columns.shape == (2, 7)
    assert (grown.parents < torch.arange(7)).all()
    for row in range(2):
        assert len(set(paths_of(grown, row))) == 7


def test_a_law_of_one_token_keeps_a_dynamic_tree_connected():
    """Values of exactly 1 along the chain and next to nothing beside it, in float32."""
    first = torch.tensor([[90.0, 0.0, -90.0, -200.0]])
    shape = DynamicTree(num_nodes=8, top_k=3, depth=4)
    grown = grow_dynamic(
        shape, first, lambda columns, _: first.expand(columns.shape[1], -1)[None], temperature=1.0
    )
    assert (grown.parents < torch.arange(8)).all()
    assert len(set(paths_of(grown, 0))) == 8


def test_a_static_tree_takes_the_choice_of_each_rank():
    source = ByPath(rows=3)
    grown = grow_static(BUSHY, source.first(), source.expand, temperature=1.0)
    for row in range(3):
        for node, path in enumerate(paths_of(grown, row)):
            law = source.law(row, path[:-1])
            assert path[-1] == law.argsort(descending=True)[BUSHY.ranks[node]]
            assert torch.isclose(grown.confidence[row, node], law[path[-1]])
    assert grown.parents.tolist() == [list(BUSHY.parents)] * 3
    assert grown.laws is None


def drawn_from(source, shape=BUSHY, seed=0, law=Sampling(temperature=1.0)):  # noqa: B008
    row = torch.arange(source.rows).unsqueeze(1)
    draws = uniforms(seed, row, torch.arange(len(shape.parents)))
    return grow_static_drawn(
        shape, source.first(), source.expand, draws, law=law, temperature=law.temperature
    )


def test_drawn_siblings_differ_and_carry_the_law_that_is_left():
    source = ByPath(rows=50)
    grown = drawn_from(source, law=Sampling(temperature=0.5))
    for row in range(50):
        paths = paths_of(grown, row)
        assert len(set(paths)) == len(paths)
        for node, path in enumerate(paths):
            left = (source.logits(row, path[:-1]) / 0.5).softmax(-1)
            best = left.sort(descending=True).values
            before = [n for n in range(node) if BUSHY.parents[n] == BUSHY.parents[node]]
            assert torch.isclose(grown.confidence[row, node], best[len(before)])
            left[[paths[n][-1] for n in before]] = 0
            assert torch.allclose(grown.laws[row, node], left / left.sum(), atol=1e-12)
    assert torch.allclose(grown.laws.sum(-1), torch.ones(50, len(BUSHY.parents)).double())


def test_siblings_come_as_often_as_drawing_without_replacement_says():
    """Chi-square over ordered pairs, 4,000 rows of one law: power over .99 against drawing again.

    The negative control is the law with replacement, which fails.
    """
    count, pair = 4000, StaticTree(parents=(-1, -1), ranks=(0, 1))
    logits = torch.tensor([1.0, 0.0, -0.5, 0.3]).double()
    draws = uniforms(3, torch.arange(count).unsqueeze(1), torch.arange(2))
    grown = grow_static_drawn(
        pair,
        logits.expand(count, -1),
        lambda *_: logits,
        draws,
        law=Sampling(temperature=1.0),
        temperature=1.0,
    )
    q = logits.softmax(-1).tolist()
    seen = grown.columns.tolist()
    cells = list(itertools.permutations(range(4), 2))
    observed = [seen.count([a, b]) for a, b in cells]
    assert sum(observed) == count
    right = [count * q[a] * q[b] / (1 - q[a]) for a, b in cells]
    assert stats.chisquare(observed, right).pvalue > 1e-4
    wrong = [q[a] * q[b] for a, b in cells]
    wrong = [count * x / sum(wrong) for x in wrong]
    assert stats.chisquare(observed, wrong).pvalue < 1e-6


def test_a_sibling_can_be_drawn_where_almost_no_mass_is_left():
    """In float32 the first token has all the mass; what is left is still a law."""
    logits = torch.tensor([[200.0, 1.0, 0.0]])
    pair = StaticTree(parents=(-1, -1, -1), ranks=(0, 1, 2))
    draws = torch.tensor([[0.5, 0.1, 0.9]]).double()
    grown = grow_static_drawn(
        pair, logits, lambda *_: logits, draws, law=Sampling(temperature=1.0), temperature=1.0
    )
    assert grown.columns.tolist() == [[0, 1, 2]]
    left = torch.tensor([1.0, 0.0]).softmax(-1)
    assert torch.allclose(grown.laws[0, 1], torch.tensor([0.0, *left.tolist()]))
    assert grown.laws[0, 2].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("shape", [BUSHY, DynamicTree(num_nodes=9, top_k=3, depth=4)])
def test_laws_shared_by_a_level_need_not_be_repeated(shape):
    levels = [torch.randn(2, COLUMNS, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    draws = uniforms(5, torch.arange(2).unsqueeze(1), torch.arange(9))
    found = []
    for repeats in (False, True):
        later = iter(levels[1:])
        for points in (True, False):
            later = iter(levels[1:])

            def expand(columns, parents, later=later, repeats=repeats):
                logits = next(later).unsqueeze(1)
                return logits.expand(-1, columns.shape[1], -1) if repeats else logits

            budget = DraftBudget(
                torch.arange(2), 4, Sampling(temperature=1.0), points=points, tree=shape
            )
            found.append(
                grow(
                    budget,
                    levels[0],
                    expand,
                    draws,
                    law=budget.sampling,
                    ids=None,
                    is_live=torch.ones(2, dtype=torch.bool),
                )
            )
    for once, repeated in zip(found[:2], found[2:], strict=True):
        assert once.tokens.equal(repeated.tokens)
        assert once.law_probs.equal(repeated.law_probs)


def grown_tree(shape, sampling, points=False, ids=None, live=(True, True, False)):
    source = ByPath(rows=3)
    budget = DraftBudget(torch.arange(3), 4, sampling, points=points, tree=shape)
    draws = uniforms(1, torch.arange(3).unsqueeze(1), torch.arange(9))
    return grow(
        budget,
        source.first(),
        source.expand,
        draws,
        law=sampling.drafting,
        ids=ids,
        is_live=torch.tensor(live),
    )


def test_a_tree_speaks_target_ids_and_rows_that_hold_nothing_draft_nothing():
    ids = torch.tensor([3, 5, 8, 13, 21, 34])
    tree = grown_tree(BUSHY, Sampling(temperature=1.0), ids=ids)
    assert tree.num_nodes.tolist() == [8, 8, 0]
    assert set(tree.tokens.flatten().tolist()) <= set(ids.tolist())
    assert tree.law_ids[1, 2].equal(ids)
    plain = grown_tree(BUSHY, Sampling(temperature=1.0))
    assert plain.law_ids is None
    assert ids[plain.tokens].equal(tree.tokens)


@pytest.mark.parametrize(
    ("shape", "sampling", "points"),
    [
        (BUSHY, GREEDY, False),
        (BUSHY, Sampling(temperature=1.0), True),
        (DynamicTree(num_nodes=9, top_k=3, depth=4), GREEDY, False),
        (DynamicTree(num_nodes=9, top_k=3, depth=4), Sampling(temperature=1.0), False),
    ],
)
def test_trees_that_are_not_drawn_carry_point_masses(shape, sampling, points):
    tree = grown_tree(shape, sampling, points)
    assert tree.law_probs.shape[-1] == 1
    assert (tree.law_probs == 1).all()
    assert tree.law_ids.squeeze(-1).equal(tree.tokens)


def test_sizes_are_told_before_anything_grows():
    assert num_levels(BUSHY) == 3
    assert num_expanded(BUSHY) == 4
    assert num_levels(DynamicTree(60, 10, 7)) == 7
    assert num_expanded(DynamicTree(60, 10, 7)) == 60


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [
        ((), ()),
        ((-1, 0), (0,)),
        ((0, -1), (0, 0)),
        ((-1, -1), (0, 0)),
        ((-1, -1), (1, 0)),
        ((-1, -2), (0, 0)),
    ],
)
def test_shapes_that_are_no_trees_are_refused(parents, ranks):
    source = ByPath(rows=1)
    with pytest.raises(ConfigError, match="every parent before its children"):
        grow_static(StaticTree(parents, ranks), source.first(), source.expand, temperature=1.0)


def test_more_children_than_draft_tokens_are_refused():
    source = ByPath(rows=1)
    with pytest.raises(ConfigError, match="7 children of a node cannot be grown over 6"):
        grow_dynamic(DynamicTree(9, 7, 2), source.first(), source.expand, temperature=1.0)


# ---------------------------------------------------------------- the best shape


def value_of(shape, rates):
    values, depths = [], []
    for parent, rank in zip(shape.parents, shape.ranks, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        depths.append(depth)
        values.append((1.0 if parent < 0 else values[parent]) * rates[depth][rank])
    return sum(values)


@pytest.mark.parametrize("num_nodes", [1, 3, 5])
def test_the_best_shape_is_the_best_of_all_shapes(num_nodes):
    rates = [[0.5, 0.3, 0.1], [0.4, 0.2, 0.15]]
    every = [(r,) for r in range(3)] + [(r, s) for r in range(3) for s in range(3)]
    best = 0.0
    for nodes in itertools.combinations(every, num_nodes):
        if all(len(path) == 1 or path[:1] in nodes for path in nodes):
            products = [rates[0][p[0]] * (rates[1][p[1]] if p[1:] else 1.0) for p in nodes]
            best = max(best, sum(products))
    shape = best_static_tree(rates, num_nodes)
    assert len(shape.parents) == num_nodes
    assert value_of(shape, rates) == pytest.approx(best)


def test_the_best_shape_has_no_gaps_in_its_ranks_and_stops_where_nothing_is_right():
    shape = best_static_tree([[0.1, 0.5, 0.0], [0.0, 0.9]], 50)
    assert shape == StaticTree(parents=(-1, -1), ranks=(0, 1))
    with pytest.raises(ConfigError, match="no choice of 2 heads was ever right"):
        best_static_tree([[0.0], [0.5]], 4)
