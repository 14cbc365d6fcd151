"""The lossy rules do what their definitions say, and their output law is not the target's."""

import math

import pytest
import torch
from exact_law import SHAPES, Draft, Toy, all_drafts, whole_tree

from draftlab.decoding.verify import verify_lossy_threshold, verify_lossy_typical
from draftlab.drafters.tree import DraftTree, chain_of_points
from draftlab.sampling import Sampling

PROBS = torch.tensor([[[0.6, 0.3, 0.1], [0.34, 0.33, 0.33], [0.1, 0.1, 0.8]]])
HALF = torch.tensor([0.5])


def typical(tree, probs, epsilon=0.2, delta=0.9):
    return verify_lossy_typical(tree, probs, next_uniforms=HALF, epsilon=epsilon, delta=delta)


def test_typical_acceptance_asks_for_less_where_the_target_is_unsure():
    entropy = -sum(x * math.log(x) for x in (0.6, 0.3, 0.1))
    assert 0.3 < 0.9 * math.exp(-entropy) < 0.6  # so epsilon alone decides about token 1
    assert typical(chain_of_points(torch.tensor([[1, 2]])), PROBS, 0.9, 0.9).num_accepted == 0
    assert typical(chain_of_points(torch.tensor([[1, 2]])), PROBS).num_accepted == 2
    assert typical(chain_of_points(torch.tensor([[2, 2]])), PROBS).num_accepted == 0
    # a flat law: even epsilon = 0.9 lets a third pass
    flat = torch.full((1, 2, 3), 1 / 3)
    assert typical(chain_of_points(torch.tensor([[1]])), flat, 0.9, 0.9).num_accepted == 1


def test_the_threshold_is_a_fraction_of_the_likeliest():
    tree = chain_of_points(torch.tensor([[1, 2]]))
    for threshold, count in ((0.51, 0), (0.49, 2)):
        verdict = verify_lossy_threshold(tree, PROBS, next_uniforms=HALF, threshold=threshold)
        assert verdict.num_accepted.tolist() == [count]


def test_the_longest_accepted_path_of_a_tree_wins_and_p_goes_on_from_its_end():
    tokens = torch.tensor([[0, 1, 2]])
    tree = DraftTree(
        tokens,
        torch.tensor([[-1, -1, 1]]),
        torch.tensor([3]),
        torch.ones(1, 3, 1),
        tokens.unsqueeze(2),
    )
    last = torch.tensor([[[1.0, 0.0, 0.0]]])
    verdict = typical(tree, torch.cat([PROBS[:, :1], PROBS[:, 2:], PROBS[:, 1:2], last], 1))
    assert verdict.path.tolist() == [[1, 2, -1]]
    assert verdict.next_token.tolist() == [0]


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_their_output_law_differs_from_the_targets(rule):
    toy = Toy(Draft(SHAPES["chain of 1"], 3), Sampling(temperature=1.0), seed=3)
    drafts = all_drafts(toy)
    tree = whole_tree(toy.draft, drafts, torch.arange(len(drafts)), torch.ones(3).long())
    probs = toy.target_probs(tree.tokens, [d[3] for d in drafts])
    u = torch.full((len(drafts),), 0.5, dtype=torch.float64)
    if rule == "typical":
        verdict = verify_lossy_typical(tree, probs, next_uniforms=u, epsilon=0.09, delta=0.3)
    else:
        verdict = verify_lossy_threshold(tree, probs, next_uniforms=u, threshold=0.2)
    law = torch.zeros(3, dtype=torch.float64)
    for draft, count in zip(drafts, verdict.num_accepted.tolist(), strict=True):
        law += draft[0] * (torch.eye(3)[draft[1][0]] if count else toy.p(()))
    assert (law - toy.p(())).abs().sum() / 2 > 1e-3
