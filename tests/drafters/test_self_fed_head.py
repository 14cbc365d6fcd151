"""EAGLE heads drafting on their own output, against one causal pass over all a draft row may see."""

import pytest
import torch
from building import REDUCED, build
from eagle_kit import (
    expected_chain,
    features_of,
    make_batch,
    observe,
    opened,
    paths_of,
    propose,
    random_tokens,
    reference_chain,
    replayed_laws,
    samples,
)

from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling, SamplingRows

CASES = {
    "eagle": ("eagle", {}),
    "eagle of two layers": ("eagle", {"num_layers": 2, "fc_bias": True}),
    "eagle3": ("eagle3", {}),
    "eagle3 of two layers": ("eagle3", {"num_layers": 2}),
    "EAGLE-3.0": ("eagle3", {"fc_norm": False, "norm_output": False, "train_head": True}),
    "eagle3, residual after the norm": (
        "eagle3",
        {"norm_before_residual": True, "fc_norm": False, "norm_before_fc": True},
    ),
}
BUSHY = StaticTree(parents=(-1, -1, 0, 0, 1, 2, 2, 4), ranks=(0, 1, 0, 1, 0, 0, 1, 0))
CHAIN = StaticTree(parents=(-1, 0, 1), ranks=(0, 0, 0))
DYNAMIC = DynamicTree(num_nodes=9, top_k=3, depth=4)
HOT = Sampling(temperature=0.7)

KINDS = pytest.mark.parametrize("kind", ["eagle", "eagle3"])
VOCABS = pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
TREES = pytest.mark.parametrize("shape", [BUSHY, DYNAMIC], ids=["static", "dynamic"])


@pytest.mark.parametrize(("kind", "key"), [("eagle", "feature_noise"), ("eagle3", "tap_noise")])
def test_noise_is_on_in_training_only_and_repeats_with_its_key(target, kind, key):
    drafter = build(kind, target, **{key: 0.5})
    batch = make_batch(samples(), 18)
    features = target.read_features(batch, drafter.needs)
    calm = drafter.eval()(batch, features, Noise(0)).total
    drafter.train()
    assert drafter(batch, features, Noise(0)).total == drafter(batch, features, Noise(0)).total
    assert drafter(batch, features, Noise(0)).total != calm
    assert drafter(batch, features, Noise(0)).total != drafter(batch, features, Noise(1)).total


@VOCABS
@pytest.mark.parametrize("case", CASES)
def test_greedy_proposals_are_the_chain_that_training_unrolled(target, case, vocab_ids):
    kind, changes = CASES[case]
    drafter = build(kind, target, vocab_ids, **changes)
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    tree = propose(drafter, state, [0, 2], 4)
    assert tree.num_nodes.tolist() == [4, 4]
    assert tree.tokens[0].tolist() == expected_chain(drafter, target, texts[1], 4)
    assert tree.tokens[1].tolist() == expected_chain(drafter, target, texts[0], 4)


@KINDS
@VOCABS
def test_the_reported_law_is_the_softmax_at_the_temperature_and_what_tokens_are_drawn_from(
    target, kind, vocab_ids
):
    drafter = build(kind, target, vocab_ids)
    text = random_tokens(7, 3)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [text], [(0, 6)])
    tree = propose(drafter, state, [1], 3, HOT)
    features = features_of(target, drafter, text[:-1])
    drawn = [*text, *tree.tokens[0].tolist()]
    ids = tree.law_ids[0, 0]
    uniforms = torch.rand(1, 3, generator=torch.Generator().manual_seed(7))
    for k, logits in enumerate(reference_chain(drafter, features, drawn, 5, 3)):
        logits = logits if vocab_ids is not None else logits[:261]
        law = (logits / 0.7).softmax(-1)
        assert torch.allclose(tree.law_probs[0, k], law)
        column = (law.cumsum(0) > uniforms[0, k]).int().argmax()
        assert tree.tokens[0, k] == ids[column]


@VOCABS
@pytest.mark.parametrize("case", list(CASES)[:5])
def test_every_node_of_a_tree_is_what_a_chain_along_its_path_would_say(target, case, vocab_ids):
    kind, changes = CASES[case]
    drafter = build(kind, target, vocab_ids, **changes)
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    drawn = propose(drafter, state, [0, 2], 4, HOT, tree=BUSHY)
    points = propose(drafter, state, [0, 2], 4, tree=BUSHY)
    dynamic = propose(drafter, state, [0, 2], 4, tree=DYNAMIC)
    columns = {int(token): i for i, token in enumerate(drawn.law_ids[0, 0])}
    for row, text in enumerate(reversed(texts)):
        paths = paths_of(drawn, row)
        laws = replayed_laws(drafter, target, text, paths, temperature=0.7)
        for node, law in enumerate(laws):
            order = law.sort(descending=True).values
            siblings = [n for n in range(node) if BUSHY.parents[n] == BUSHY.parents[node]]
            assert abs(drawn.confidence[row, node] - order[len(siblings)]) < 1e-10
            for sibling in siblings:
                law[columns[int(drawn.tokens[row, sibling])]] = 0
            assert torch.allclose(drawn.law_probs[row, node], law / law.sum(), atol=1e-10)
        for tree in (points, dynamic):
            paths = paths_of(tree, row)
            for node, law in enumerate(replayed_laws(drafter, target, text, paths)):
                own = law[columns[int(tree.tokens[row, node])]]
                assert abs(tree.confidence[row, node] - own) < 1e-10
                assert int((law > own).sum()) == sum(
                    bool(tree.parents[row, n] == tree.parents[row, node]) for n in range(node)
                )


def test_a_tree_without_branches_is_the_chain(target):
    drafter = build("eagle3", target, REDUCED)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [random_tokens(7, 3)], [(0, 6)])
    for sampling in (GREEDY, HOT):
        chain, tree = (propose(drafter, state, [1], 3, sampling, tree=t) for t in (None, CHAIN))
        assert chain.tokens.equal(tree.tokens)
        assert torch.allclose(chain.law_probs.double(), tree.law_probs.double())


@KINDS
@TREES
def test_nothing_of_a_tree_outlives_its_round(target, shape, kind):
    drafter = build(kind, target, num_layers=2)
    text = random_tokens(12, 30)
    state, fresh = opened(drafter, target), opened(drafter, target)
    observe(drafter, state, target, [0], [text[:7]], [(0, 6)])
    before = propose(drafter, state, [0], 4)
    first = propose(drafter, state, [0], 4, tree=shape)
    assert propose(drafter, state, [0], 4).tokens.equal(before.tokens)
    assert propose(drafter, state, [0], 4, tree=shape).tokens.equal(first.tokens)
    observe(drafter, state, target, [0], [text[:9]], [(6, 8)])
    observe(drafter, fresh, target, [0], [text[:9]], [(0, 8)])
    again, expected = (propose(drafter, s, [0], 4, tree=shape) for s in (state, fresh))
    assert again.tokens.equal(expected.tokens)
    assert torch.allclose(again.confidence, expected.confidence)


@TREES
def test_rows_of_a_tree_do_not_depend_on_each_other(target, shape):
    drafter = build("eagle3", target)
    state = opened(drafter, target, capacity=12)
    texts = [random_tokens(12, 1), random_tokens(5, 2)]
    observe(drafter, state, target, [1, 2], texts, [(0, 11), (0, 4)])  # row 1 is at its capacity
    shared = propose(drafter, state, [0, 1, 2], 4, tree=shape)
    alone = propose(drafter, state, [2], 4, tree=shape)
    assert shared.num_nodes.tolist() == [0, shared.tokens.shape[1], shared.tokens.shape[1]]
    assert shared.tokens[2].equal(alone.tokens[0])
    assert shared.parents[2].equal(alone.parents[0])


def test_a_chain_tells_how_sure_it_is_before_it_draws_and_ends_when_it_is_not(target):
    drafter = build("eagle3", target, REDUCED)
    text = random_tokens(7, 3)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [text], [(0, 6)])
    assert propose(drafter, state, [0], 4, HOT).confidence is None
    told = propose(drafter, state, [0], 4, HOT, min_confidence=0.0)
    laws = replayed_laws(drafter, target, text, paths_of(told, 0), temperature=0.7)
    assert torch.allclose(told.confidence[0], torch.stack([law.max() for law in laws]))
    assert told.num_nodes.tolist() == [4]
    other = propose(drafter, state, [0], 4, HOT, min_confidence=0.0, seed=8)
    assert not told.tokens.equal(other.tokens)
    assert told.confidence[0, 0] == other.confidence[0, 0]

    bar = float(told.confidence[0].min()) + 1e-6
    first = int((told.confidence[0] < bar).int().argmax())
    cut = propose(drafter, state, [0], 4, HOT, min_confidence=bar)
    assert cut.num_nodes.tolist() == [first]
    assert cut.tokens[0, :first].equal(told.tokens[0, :first])
    assert propose(drafter, state, [0], 4, HOT, min_confidence=1.1).num_nodes.tolist() == [0]


def test_rows_at_temperatures_of_their_own_draft_as_they_would_alone(target):
    drafter = build("eagle3", target, REDUCED)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(9, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 5), (0, 8)])
    laws = SamplingRows.of([GREEDY, HOT], torch.device("cpu"))
    for shape in (None, BUSHY, DYNAMIC):
        both = propose(drafter, state, [0, 1], 4, laws, tree=shape)
        greedy = propose(drafter, state, [0], 4, tree=shape)
        assert both.tokens[0].equal(greedy.tokens[0])
        hot = propose(drafter, state, [0, 1], 4, HOT, tree=shape)
        assert both.tokens[1].equal(hot.tokens[1])
        assert torch.allclose(both.law_probs[1], hot.law_probs[1])
