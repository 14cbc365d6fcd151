"""Hydra heads: what each one reads, how they start, and drafts that know ancestors."""

import pytest
import torch
from building import build
from eagle_kit import make_batch, observe, opened, propose, random_tokens

from draftlab.drafters.base import num_trainable
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.sampling import GREEDY, Sampling, process

HEADS = 3
LENGTH = 12


def make(target, **changes):
    return build("hydra", target, stir=0.05, **changes)


def after(drafter, target, length=LENGTH):
    """The state after all tokens but the last, which is the anchor, and the final state."""
    text = random_tokens(LENGTH, 1)[:length]
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [text], [(0, length - 1)])
    final = target.read_features(make_batch([(text, 0)], length), drafter.needs).final
    return state, torch.tensor(text[-1]), final[0, -2]


@torch.no_grad()
def laws_along(drafter, target, hidden, tokens):
    """Logits of every head on a path of tokens, the anchor first."""
    joined, logits = hidden, []
    for k, token in enumerate(tokens):
        joined = torch.cat([joined, target.view.embed(token.view(1))[0]])
        refined = drafter.lm_heads.into(k, drafter.heads[k](joined))
        matrices = drafter.lm_heads.matrices
        logits.append(matrices[k if len(matrices) > 1 else 0] @ refined)
    return logits


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_heads_start_as_the_targets_own_head(target, head, prefix):
    drafter = build("hydra", target, head=head, prefix_attention=prefix)
    state, _, hidden = after(drafter, target)
    expected = int(target.view.head(hidden)[: target.spec.num_token_ids].argmax())
    assert propose(drafter, state, [0], HEADS).tokens.tolist() == [[expected] * HEADS]


def test_the_prefix_layer_sees_all_states_before_and_none_after(target):
    drafter = make(target, prefix_attention=True)
    hidden = [after(drafter, target, length)[0].hidden[0] for length in (8, 12)]
    batch = make_batch([(random_tokens(LENGTH, 1), 4)], LENGTH)
    final = target.read_features(batch, drafter.needs).final
    states, places = drafter._states(batch, final, torch.ones(1, 1, LENGTH, dtype=torch.bool))
    assert torch.allclose(states[0, places[0, 6]], hidden[0])
    assert torch.allclose(states[0, places[0, 10]], hidden[1])
    assert not torch.allclose(hidden[0], final[0, 6], atol=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)], ids=["greedy", "drawn"])
def test_every_draft_token_follows_from_those_before_it(target, sampling):
    drafter = make(target)
    state, anchor, hidden = after(drafter, target)
    tree = propose(drafter, state, [0], HEADS, sampling)
    path = torch.cat([anchor.view(1), tree.tokens[0, :-1]])
    known = target.spec.num_token_ids
    for k, logits in enumerate(laws_along(drafter, target, hidden, path)):
        if sampling.is_greedy:
            assert int(logits[:known].argmax()) == int(tree.tokens[0, k])
        else:
            assert torch.allclose(tree.law_probs[0, k], process(logits[:known], sampling))


@pytest.mark.parametrize(
    "shape",
    [StaticTree((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0)), DynamicTree(6, 2, 3)],
    ids=["static", "dynamic"],
)
def test_nodes_of_a_tree_know_their_own_ancestors(target, shape):
    drafter = make(target)
    state, anchor, hidden = after(drafter, target)
    tree = propose(drafter, state, [0], HEADS, tree=shape)
    known = target.spec.num_token_ids
    for node in range(6):
        path, parent = [], int(tree.parents[0, node])
        while parent >= 0:
            path.insert(0, tree.tokens[0, parent])
            parent = int(tree.parents[0, parent])
        path = torch.stack([anchor, *path])
        law = laws_along(drafter, target, hidden, path)[-1][:known].softmax(-1)
        chance = tree.confidence[0, node]
        assert torch.isclose(law[tree.tokens[0, node]], chance)
        assert int((law > chance + 1e-9).sum()) < 2


def test_a_confidence_is_told_before_its_token_when_asked_for(target):
    drafter = make(target)
    state, anchor, hidden = after(drafter, target)
    tree = propose(drafter, state, [0], 2, Sampling(temperature=1.0), min_confidence=0.0)
    path = torch.cat([anchor.view(1), tree.tokens[0, :1]])
    known = target.spec.num_token_ids
    expected = [x[:known].softmax(-1).max() for x in laws_along(drafter, target, hidden, path)]
    assert tree.confidence[0].tolist() == pytest.approx([x.item() for x in expected])


def test_a_tied_hydra_trains_and_saves_its_mlps_alone(target):
    drafter = build("hydra", target)
    widths = [64 * (2 + k) for k in range(HEADS)]
    expected = sum(2 * (width * 64 + 64) + 64 * 64 + 64 for width in widths)
    assert num_trainable(drafter) == expected
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"heads"}
