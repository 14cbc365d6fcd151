"""Medusa heads: how they start, what they report and hand out."""

import pytest
import torch
from building import REDUCED, build
from eagle_kit import make_batch, random_tokens

from draftlab.drafters.base import DraftBudget, Observation, num_trainable
from draftlab.drafters.store import load_drafter, save_drafter
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling, process
from draftlab.targets.features import TargetFeatures

HEADS = 3


def make(target, vocab_ids=None, **changes):
    """Build heads and blocks that all differ."""
    return build("medusa", target, vocab_ids, stir=0.05, **changes)


def one_sample(length=12):
    return make_batch([(random_tokens(length, 1), 4)], length)


def state_after(drafter, target, hidden):
    kv = target.open_kv(1, 4)
    state = drafter.open(1, 4, kv)
    one = torch.zeros(1, 1, dtype=torch.int64)
    final = hidden.view(1, 1, -1)
    drafter.observe(state, Observation(one[0], one, one[0] + 1, one, None, final))
    return state


@torch.no_grad()
def proposal(drafter, target, hidden, sampling=GREEDY, depth=HEADS):
    draws = torch.full((1, depth), 0.5, dtype=torch.float64)
    budget = DraftBudget(torch.tensor([0]), depth, sampling)
    return drafter.propose(state_after(drafter, target, hidden), budget, draws)


@pytest.mark.parametrize("head", ["own", "tied"])
def test_heads_start_as_the_targets_own_head(target, head):
    drafter = build("medusa", target, head=head)
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = target.view.head(hidden)[: target.spec.num_token_ids].argmax().item()
    assert proposal(drafter, target, hidden).tokens.tolist() == [[expected] * HEADS]


def test_a_low_rank_head_starts_as_the_best_of_its_rank(target):
    drafter = build("medusa", target, head="low_rank", head_rank=8)
    rows = target.view.head_rows(None)
    product = drafter.lm_heads[0].weight @ drafter.downs[0].weight
    left = torch.linalg.svdvals(rows)[8:].square().sum()
    assert (rows - product).square().sum().item() == pytest.approx(left.item(), rel=1e-5)


def test_every_block_has_weights_of_its_own(target):
    drafter = build("medusa", target, num_blocks=2)
    assert num_trainable(drafter) == HEADS * 2 * (64 * 64 + 64)


def test_over_a_reduced_vocabulary_heads_draw_at_the_temperature_alone_and_report_that(target):
    drafter = make(target, REDUCED, head="own")
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.7, top_k=20)
    tree = proposal(drafter, target, hidden, sampling)
    for k in range(HEADS):
        logits = drafter.blocks[k](hidden) @ drafter.lm_heads[k].weight.T
        law = (logits / 0.7).softmax(-1)
        assert torch.allclose(tree.law_probs[0, k], law)
    assert torch.equal(tree.law_ids[0, 0], REDUCED)
    assert torch.isin(tree.tokens, REDUCED).all()


def test_serving_weights_have_full_heads_and_absolute_ids(target):
    ids = torch.arange(3, 123)
    drafter = make(target, ids, head="low_rank", head_rank=8)
    weights = drafter.serving_weights()
    shapes = {name: list(t.shape) for name, t in weights.tensors.items()}
    assert shapes == {
        **{f"blocks.{k}.layers.0.weight": [64, 64] for k in range(HEADS)},
        **{f"blocks.{k}.layers.0.bias": [64] for k in range(HEADS)},
        **{f"lm_heads.{k}.weight": [120, 64] for k in range(HEADS)},
        "token_map": [120],
    }
    assert weights.tensors["token_map"].tolist() == list(range(3, 123))
    assert weights.config["draft_vocab_size"] == 120
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    refined = hidden + torch.nn.functional.silu(
        weights.tensors["blocks.1.layers.0.weight"] @ hidden
        + weights.tensors["blocks.1.layers.0.bias"]
    )
    best = int((weights.tensors["lm_heads.1.weight"] @ refined).argmax())
    assert proposal(drafter, target, hidden).tokens[0, 1].item() == ids[best].item()


def test_a_tied_drafter_hands_out_one_shared_head(target):
    weights = build("medusa", target).serving_weights()
    assert weights.config["has_shared_head"]
    assert torch.equal(weights.tensors["lm_head.weight"], target.view.head_rows(None))
    assert not [name for name in weights.tensors if name.startswith("lm_heads")]


def test_nothing_of_the_target_is_saved_or_trained_when_tied(target):
    drafter = build("medusa", target)
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"blocks", "rank_hits"}
    loss = drafter(one_sample(), target.read_features(one_sample(), drafter.needs), Noise(0))
    loss.total.backward()
    assert isinstance(target.read_features(one_sample(), drafter.needs), TargetFeatures)
    assert all(p.grad is None for p in target.model.parameters())


# ---------------------------------------------------------------- trees

BUSHY = StaticTree(parents=(-1, -1, 0, 0, 1, 2), ranks=(0, 1, 0, 2, 0, 0))


@torch.no_grad()
def tree_proposal(drafter, target, hidden, shape, sampling=GREEDY, **more):
    draws = torch.linspace(0.05, 0.95, 6, dtype=torch.float64).unsqueeze(0)
    budget = DraftBudget(torch.tensor([0]), HEADS, sampling, tree=shape, **more)
    return drafter.propose(state_after(drafter, target, hidden), budget, draws)


def test_a_tree_is_a_product_of_what_the_heads_say(target):
    drafter = make(target, head="own")
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    known = target.spec.num_token_ids
    laws = [
        (drafter.blocks[k](hidden) @ drafter.lm_heads[k].weight.T)[:known].softmax(-1)
        for k in range(HEADS)
    ]
    tree = tree_proposal(drafter, target, hidden, BUSHY)
    for node, (depth, rank) in enumerate(zip((0, 0, 1, 1, 1, 2), BUSHY.ranks, strict=True)):
        best = laws[depth].sort(descending=True)
        assert tree.tokens[0, node] == best.indices[rank]
        assert torch.isclose(tree.confidence[0, node], best.values[rank])
    grown = tree_proposal(drafter, target, hidden, DynamicTree(num_nodes=6, top_k=2, depth=3))
    assert set(grown.tokens[0].tolist()) <= {int(i) for law in laws for i in law.topk(2).indices}


def test_drawn_siblings_follow_the_targets_own_filters(target):
    drafter = make(target, head="own")
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.7, top_k=20)
    tree = tree_proposal(drafter, target, hidden, BUSHY, sampling)
    logits = (drafter.blocks[0](hidden) @ drafter.lm_heads[0].weight.T).detach()
    logits[target.spec.num_token_ids :] = -torch.inf
    assert torch.allclose(tree.law_probs[0, 0], process(logits, sampling))
    logits[tree.tokens[0, 0]] = -torch.inf
    assert torch.allclose(tree.law_probs[0, 1], process(logits, sampling))


def test_a_chain_tells_the_largest_probability_of_each_head_when_asked(target):
    drafter = make(target)
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert proposal(drafter, target, hidden).confidence is None
    chain = tree_proposal(drafter, target, hidden, None, min_confidence=0.0)
    tree = tree_proposal(drafter, target, hidden, StaticTree((-1, 0, 1), (0, 0, 0)))
    assert torch.allclose(chain.confidence, tree.confidence)


def counted(target, drafter):
    batches = []
    for length in (12, 30):
        batch = one_sample(length)
        batches.append((batch, target.read_features(batch, drafter.needs)))
    drafter.measure_ranks(batches)
    return batches


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_ranks_are_counted_by_the_targets_own_choices(target, head, vocab_ids):
    drafter = make(target, vocab_ids, head=head)
    counted(target, drafter)
    batches = counted(target, drafter)  # a second time replaces the first
    expected = torch.zeros(HEADS, 11, dtype=torch.int64)
    for batch, features in batches:
        final = features.final[0]
        for s in batch.shifted_mask(1)[0].nonzero().flatten().tolist():
            chosen = target.view.head(final[s]).argmax()
            for k in range(HEADS):
                if s - 1 - k < 0:
                    continue
                tied = target.view.head_rows(vocab_ids)
                rows = tied if head == "tied" else drafter.lm_heads[k].weight
                logits = drafter.blocks[k](final[s - 1 - k]) @ rows[:261].T  # the rest is padding
                order = logits.argsort(descending=True)
                order = order if vocab_ids is None else vocab_ids[order]
                rank = (order == chosen).nonzero().flatten()
                expected[k, 10] += 1
                if len(rank) and rank < 10:
                    expected[k, int(rank)] += 1
    assert drafter.rank_hits.equal(expected)


def test_the_best_tree_comes_from_the_counts_and_travels_with_the_heads(target, tmp_path):
    drafter = build("medusa", target)
    with pytest.raises(ConfigError, match="no counts of how often"):
        drafter.best_tree(4)
    drafter.rank_hits[:, 10] = 100
    drafter.rank_hits[0, :3] = torch.tensor([60, 25, 5])
    drafter.rank_hits[1, :2] = torch.tensor([50, 10])
    expected = StaticTree(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
    assert drafter.best_tree(4) == expected
    save_drafter(drafter.bfloat16(), tmp_path, extra={})
    loaded = load_drafter(tmp_path, target.view)
    assert loaded.rank_hits.equal(drafter.rank_hits)
    assert loaded.best_tree(4) == expected
