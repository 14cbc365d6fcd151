"""Medusa heads: which token each one learns, how they start, what they report and hand out."""

import pytest
import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import DraftBudget, Observation, num_trainable
from draftlab.drafters.medusa import Medusa, MedusaSettings
from draftlab.drafters.store import load_drafter, save_drafter
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling, process
from draftlab.settings.base import parse_settings
from draftlab.targets.features import TargetFeatures
from draftlab.targets.tiny import tiny_target

HEADS = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    data = {
        "kind": "medusa",
        "num_draft_tokens": HEADS,
        "draft_vocab_size": None,
        "num_heads": HEADS,
        "num_blocks": 1,
        "head": "tied",
        "head_rank": None,
        "objective": "forward_kl",
        "position_weights": "decay",
        "head_decay": 0.8,
        "normalise": "sequence",
    }
    return parse_settings(MedusaSettings, data | changes)


def build(target, vocab=None, **changes):
    return Medusa(settings(**changes), target.view, vocab=vocab).to(target.dtype)


def stir(drafter, seed=0):
    """Move every weight a little, so that heads and blocks differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return drafter


def one_sample(target, length=12, prompt=4):
    ids = torch.randint(200, (1, length), generator=torch.Generator().manual_seed(1))
    place = torch.arange(length).unsqueeze(0)
    zeros = torch.zeros_like(place)
    return TokenBatch(ids, place >= prompt, place, zeros, zeros)


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


@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, 240, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_head_k_is_judged_at_the_row_that_predicts_token_t_plus_2_plus_k(target, head, vocab_ids):
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, 320)
    drafter = stir(build(target, vocab=vocab, head=head))
    batch = one_sample(target, length=20)
    features = target.read_features(batch, drafter.needs)
    got = drafter(batch, features, Noise(0))
    total, weight = 0.0, 0.0
    hits = torch.zeros(HEADS)
    for k in range(HEADS):
        for t in range(20 - 2 - k):
            if not batch.loss_mask[0, t + 2 + k]:
                continue
            h = drafter.blocks[k](features.final[0, t : t + 1])
            tied = target.view.head_rows(vocab_ids)
            rows = tied if head == "tied" else drafter.lm_heads[k].weight
            scores = score_rows(
                objective("forward_kl"),
                target.view.head(features.final[0, t + 1 + k : t + 2 + k]),
                h @ rows.T,
                batch.input_ids[0, t + 2 + k : t + 3 + k],
                vocab_ids,
            )
            total += 0.8**k * scores.loss.item()
            weight += 0.8**k
            if vocab is None or (t + 1 + k) % 8 == 0:  # where a reduced vocabulary is judged
                hits[k] += scores.hit.item()
    assert got.total.item() == pytest.approx(total / weight)
    assert got.count.tolist() == [16 if vocab is None else 2] * HEADS
    assert got.hit_sum.tolist() == hits.tolist()


@pytest.mark.parametrize("head", ["own", "tied"])
def test_heads_start_as_the_targets_own_head(target, head):
    drafter = build(target, head=head)
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = target.view.head(hidden)[: target.spec.num_token_ids].argmax().item()
    assert proposal(drafter, target, hidden).tokens.tolist() == [[expected] * HEADS]


def test_a_low_rank_head_starts_as_the_best_of_its_rank(target):
    drafter = build(target, head="low_rank", head_rank=8)
    rows = target.view.head_rows(None)
    product = drafter.lm_heads[0].weight @ drafter.downs[0].weight
    left = torch.linalg.svdvals(rows)[8:].square().sum()
    assert (rows - product).square().sum().item() == pytest.approx(left.item(), rel=1e-5)


def test_every_block_has_weights_of_its_own(target):
    drafter = build(target, num_blocks=2)
    assert num_trainable(drafter) == HEADS * 2 * (64 * 64 + 64)


def test_the_reported_law_is_the_one_each_head_drew_from(target):
    vocab = DraftVocab(torch.arange(0, 240, 2), 320)
    drafter = stir(build(target, vocab=vocab, head="own", draft_vocab_size=120))
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.7, top_k=20)
    tree = proposal(drafter, target, hidden, sampling)
    for k in range(HEADS):
        logits = drafter.blocks[k](hidden) @ drafter.lm_heads[k].weight.T
        assert torch.allclose(tree.law_probs[0, k], process(logits, sampling))
    assert torch.equal(tree.law_ids[0, 0], vocab.ids)
    assert (tree.tokens % 2 == 0).all()


def test_more_drafts_than_heads_are_refused(target):
    hidden = torch.zeros(64, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"num_draft_tokens=4 is more than .* num_heads=3"):
        proposal(build(target), target, hidden, depth=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 2}, "num_heads=2 is below num_draft_tokens=3"),
        ({"head_rank": 8}, "head_rank=8 with head=tied"),
        ({"head": "low_rank"}, "head_rank=None with head=low_rank"),
        ({"objective": "kl"}, "objective='kl': expected one of"),
        ({"position_weights": "d_pace"}, "head_decay=0.8 with position_weights=d_pace"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(target, **changes)


def test_a_rank_above_the_width_is_refused(target):
    with pytest.raises(ConfigError, match="head_rank=65 exceeds the target's hidden size 64"):
        build(target, head="low_rank", head_rank=65)


def test_serving_weights_have_full_heads_and_absolute_ids(target):
    vocab = DraftVocab(torch.arange(3, 123), 320)
    drafter = stir(build(target, vocab=vocab, head="low_rank", head_rank=8, draft_vocab_size=120))
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
    assert proposal(drafter, target, hidden).tokens[0, 1].item() == vocab.ids[best].item()


def test_a_tied_drafter_hands_out_one_shared_head(target):
    weights = build(target).serving_weights()
    assert weights.config["has_shared_head"]
    assert torch.equal(weights.tensors["lm_head.weight"], target.view.head_rows(None))
    assert not [name for name in weights.tensors if name.startswith("lm_heads")]


def test_nothing_of_the_target_is_saved_or_trained_when_tied(target):
    drafter = build(target)
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"blocks", "rank_hits"}
    loss = drafter(
        one_sample(target), target.read_features(one_sample(target), drafter.needs), Noise(0)
    )
    loss.total.backward()
    assert isinstance(target.read_features(one_sample(target), drafter.needs), TargetFeatures)
    assert all(p.grad is None for p in target.model.parameters())


# ---------------------------------------------------------------- trees

BUSHY = StaticTree(parents=(-1, -1, 0, 0, 1, 2), ranks=(0, 1, 0, 2, 0, 0))


@torch.no_grad()
def tree_proposal(drafter, target, hidden, shape, sampling=GREEDY, **more):
    draws = torch.linspace(0.05, 0.95, 6, dtype=torch.float64).unsqueeze(0)
    budget = DraftBudget(torch.tensor([0]), HEADS, sampling, tree=shape, **more)
    return drafter.propose(state_after(drafter, target, hidden), budget, draws)


def test_a_tree_is_a_product_of_what_the_heads_say(target):
    drafter = stir(build(target, head="own"))
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
    drafter = stir(build(target, head="own"))
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=0.7, top_k=20)
    tree = tree_proposal(drafter, target, hidden, BUSHY, sampling)
    logits = (drafter.blocks[0](hidden) @ drafter.lm_heads[0].weight.T).detach()
    logits[target.spec.num_token_ids :] = -torch.inf
    assert torch.allclose(tree.law_probs[0, 0], process(logits, sampling))
    logits[tree.tokens[0, 0]] = -torch.inf
    assert torch.allclose(tree.law_probs[0, 1], process(logits, sampling))


def test_a_chain_tells_the_largest_probability_of_each_head_when_asked(target):
    drafter = stir(build(target))
    hidden = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    assert proposal(drafter, target, hidden).confidence is None
    chain = tree_proposal(drafter, target, hidden, None, min_confidence=0.0)
    tree = tree_proposal(drafter, target, hidden, StaticTree((-1, 0, 1), (0, 0, 0)))
    assert torch.allclose(chain.confidence, tree.confidence)


def test_trees_deeper_than_the_heads_are_refused(target):
    with pytest.raises(ConfigError, match=r"depth of the tree=4 is more than .* num_heads=3"):
        tree_proposal(
            build(target), target, torch.zeros(64).double(), DynamicTree(8, top_k=2, depth=4)
        )


def counted(target, drafter):
    batches = []
    for length in (12, 30):
        batch = one_sample(target, length)
        batches.append((batch, target.read_features(batch, drafter.needs)))
    drafter.measure_ranks(batches)
    return batches


@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, 240, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_ranks_are_counted_by_the_targets_own_choices(target, head, vocab_ids):
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, 320)
    drafter = stir(build(target, vocab=vocab, head=head))
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
    drafter = build(target)
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
