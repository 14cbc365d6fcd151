"""Proposals read off one pass, by P-EAGLE and DFlash, against that pass run alone and plainly."""

import itertools

import pytest
import torch
from block_kit import SHAPES, expected_laws
from building import REDUCED, build
from eagle_kit import observe, opened, propose, random_tokens

from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.sampling import GREEDY, Sampling

CASES = {
    "peagle": ("peagle", {}),
    "peagle of one layer": ("peagle", {"num_layers": 1}),
    "peagle without norms": ("peagle", {"fc_norm": False}),
    "peagle, residual after the norm": (
        "peagle",
        {"norm_before_residual": True, "mask_token_id": 300},
    ),
    **{f"dflash, {shape}": ("dflash", changes) for shape, changes in SHAPES.items()},
}
KINDS = pytest.mark.parametrize("kind", ["peagle", "dflash"])


def make(target, kind, vocab_ids=None, **changes):
    return build(kind, target, vocab_ids, stir=0.1 if kind == "dflash" else 0.0, **changes)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("case", CASES)
def test_proposals_are_what_training_ran_and_their_laws_are_reported(target, case, vocab_ids):
    kind, changes = CASES[case]
    drafter = make(target, kind, vocab_ids, **changes)
    depth = drafter.max_draft_tokens
    texts = [random_tokens(13, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 12), (0, 4)])
    greedy = propose(drafter, state, [0, 2], depth)
    drawn = propose(drafter, state, [0, 2], depth, Sampling(temperature=0.7))
    uniforms = torch.rand(2, depth, generator=torch.Generator().manual_seed(7))
    assert drawn.num_nodes.tolist() == [depth, depth]
    for row, text in enumerate((texts[1], texts[0])):
        ids, laws = expected_laws(drafter, target, text, depth)
        assert greedy.tokens[row].tolist() == ids[laws.argmax(-1)].tolist()
        ids, laws = expected_laws(drafter, target, text, depth, temperature=0.7)
        assert torch.allclose(drawn.law_probs[row], laws, atol=1e-9)
        columns = (laws.cumsum(-1) > uniforms[row].unsqueeze(1)).int().argmax(-1)
        assert drawn.tokens[row].tolist() == ids[columns].tolist()


@pytest.mark.parametrize("case", ["peagle", "dflash, two-way", "dflash, causal"])
def test_a_token_s_law_does_not_depend_on_how_many_are_asked_for(target, case):
    kind, changes = CASES[case]
    drafter = make(target, kind, **changes)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 3)], [(0, 8)])
    long, short = (propose(drafter, state, [0], n, Sampling(temperature=1.0)) for n in (3, 1))
    assert torch.allclose(short.law_probs, long.law_probs[:, :1], atol=1e-12)


@KINDS
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_tree_s_nodes_have_the_law_of_their_depth(target, sampling, kind):
    drafter = make(target, kind, REDUCED)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    shape = StaticTree(parents=(-1, -1, 0, 0, 1), ranks=(0, 1, 0, 1, 0))
    tree = propose(drafter, state, [0], 2, sampling, tree=shape)
    assert tree.num_nodes.tolist() == [5]
    ids, laws = expected_laws(drafter, target, text, 2)
    best = ids[laws.argsort(-1, descending=True)]
    if sampling.is_greedy:
        levels = [best[0, 0], best[0, 1], best[1, 0], best[1, 1], best[1, 0]]
        assert tree.tokens[0].tolist() == [int(t) for t in levels]
    else:
        for node, level in ((0, 0), (2, 1), (4, 1)):  # first children, nothing taken out yet
            assert torch.allclose(tree.law_probs[0, node], laws[level], atol=1e-9)


@KINDS
def test_a_dynamic_tree_keeps_the_likeliest_paths(target, kind):
    drafter = make(target, kind)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    tree = propose(drafter, state, [0], 3, tree=DynamicTree(num_nodes=6, top_k=3, depth=3))
    ids, laws = expected_laws(drafter, target, text, 3)
    best = [law.topk(3) for law in laws]
    products = sorted(
        (
            torch.stack([best[d].values[r] for d, r in enumerate(path)]).prod().item()
            for depth in (1, 2, 3)
            for path in itertools.product(range(3), repeat=depth)
        ),
        reverse=True,
    )
    found = []
    for node in range(6):
        chance, at = 1.0, node
        while at >= 0:
            depth, up = 0, int(tree.parents[0, at])
            while up >= 0:
                depth, up = depth + 1, int(tree.parents[0, up])
            chance *= laws[depth][ids == tree.tokens[0, at]].item()
            at = int(tree.parents[0, at])
        found.append(chance)
    assert sorted(found, reverse=True) == pytest.approx(products[:6])


@KINDS
def test_confidence_is_told_when_asked_for_and_is_the_law_s_largest_probability(target, kind):
    drafter = make(target, kind)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 3)], [(0, 8)])
    sampling = Sampling(temperature=2.0)
    assert propose(drafter, state, [0], 3, sampling).confidence is None
    tree = propose(drafter, state, [0], 3, sampling, min_confidence=0.1)
    assert torch.allclose(tree.confidence, tree.law_probs.max(-1).values)
