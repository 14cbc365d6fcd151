"""Hydra heads: what each one reads and learns, how they start, and drafts that know ancestors."""

import pytest
import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import DraftBudget, Observation, num_trainable
from draftlab.drafters.hydra import Hydra, HydraSettings
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling, process
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

HEADS = 3
LENGTH = 12


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_hidden_layers=2)


def settings(**changes):
    data = {
        "kind": "hydra",
        "num_draft_tokens": HEADS,
        "draft_vocab_size": None,
        "num_heads": HEADS,
        "num_blocks": 2,
        "prefix_attention": False,
        "head": "tied",
        "head_rank": None,
        "objective": "forward_kl",
        "position_weights": "decay",
        "head_decay": 0.8,
        "normalise": "sequence",
    }
    return parse_settings(HydraSettings, data | changes)


def build(target, vocab=None, **changes):
    torch.manual_seed(0)
    return Hydra(settings(**changes), target.view, vocab=vocab)


def stir(drafter):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


def sample(length=LENGTH, prompt=4):
    ids = torch.randint(200, (1, length), generator=torch.Generator().manual_seed(1))
    place = torch.arange(length).unsqueeze(0)
    zeros = torch.zeros_like(place)
    return TokenBatch(ids, place >= prompt, place, zeros, zeros)


def after(drafter, target, length=LENGTH):
    """The state after all tokens but the last, which is the anchor, and the final states."""
    batch = sample(length)
    ids, final = batch.input_ids, target.read_features(batch, drafter.needs).final
    state = drafter.open(1, 32, target.open_kv(1, 32))
    row, count = torch.tensor([0]), torch.tensor([length - 1])
    drafter.observe(state, Observation(row, ids[:, :-1], count, ids[:, 1:], None, final[:, :-1]))
    return state, ids[0, -1], final[0, -2]


def propose(drafter, state, sampling=GREEDY, depth=HEADS, tree=None):
    draws = torch.full((1, 16), 0.4, dtype=torch.float64)
    return drafter.propose(
        state, DraftBudget(torch.tensor([0]), depth, sampling, tree=tree), draws[:, :depth]
    )


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


@pytest.mark.parametrize("vocab_ids", [None, torch.arange(0, 240, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_head_k_reads_the_tokens_up_to_its_own_and_is_judged_where_it_predicts(
    target, head, vocab_ids
):
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, 320)
    drafter = stir(build(target, vocab=vocab, head=head))
    batch = sample()
    features = target.read_features(batch, drafter.needs)
    got = drafter(batch, features, Noise(0))
    ids, final = batch.input_ids[0], features.final[0]
    total = weights = 0.0
    losses = torch.zeros(HEADS, dtype=torch.float64)
    for t in range(LENGTH - 2):
        depth = min(HEADS, LENGTH - 2 - t)
        for k, logits in enumerate(laws_along(drafter, target, final[t], ids[t + 1 :][:depth])):
            if not batch.loss_mask[0, t + 2 + k]:
                continue
            scores = score_rows(
                objective("forward_kl"),
                target.view.head(final[t + 1 + k : t + 2 + k]),
                logits.unsqueeze(0),
                ids[t + 2 + k : t + 3 + k],
                vocab_ids,
            )
            total += 0.8**k * scores.loss.item()
            weights += 0.8**k
            if vocab is None or (t + 1 + k) % 8 == 0:
                losses[k] += scores.loss.item()
    assert got.total.item() == pytest.approx(total / weights)
    assert got.loss_sum.tolist() == pytest.approx(losses.tolist())


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("head", ["own", "tied"])
def test_heads_start_as_the_targets_own_head(target, head, prefix):
    drafter = build(target, head=head, prefix_attention=prefix)
    state, _, hidden = after(drafter, target)
    expected = int(target.view.head(hidden)[: target.spec.num_token_ids].argmax())
    assert propose(drafter, state).tokens.tolist() == [[expected] * HEADS]


def test_the_prefix_layer_sees_all_states_before_and_none_after(target):
    drafter = stir(build(target, prefix_attention=True))
    hidden = [after(drafter, target, length)[0].hidden[0] for length in (8, 12)]
    batch = sample()
    final = target.read_features(batch, drafter.needs).final
    states, places = drafter._states(batch, final, torch.ones(1, 1, LENGTH, dtype=torch.bool))
    assert torch.allclose(states[0, places[0, 6]], hidden[0])
    assert torch.allclose(states[0, places[0, 10]], hidden[1])
    assert not torch.allclose(hidden[0], final[0, 6], atol=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7)], ids=["greedy", "drawn"])
def test_every_draft_token_follows_from_those_before_it(target, sampling):
    drafter = stir(build(target))
    state, anchor, hidden = after(drafter, target)
    tree = propose(drafter, state, sampling)
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
    drafter = stir(build(target))
    state, anchor, hidden = after(drafter, target)
    tree = propose(drafter, state, tree=shape)
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
    drafter = stir(build(target))
    state, anchor, hidden = after(drafter, target)
    budget = DraftBudget(torch.tensor([0]), 2, Sampling(temperature=1.0), min_confidence=0.0)
    tree = drafter.propose(state, budget, torch.tensor([[0.99, 0.5]], dtype=torch.float64))
    path = torch.cat([anchor.view(1), tree.tokens[0, :1]])
    known = target.spec.num_token_ids
    expected = [x[:known].softmax(-1).max() for x in laws_along(drafter, target, hidden, path)]
    assert tree.confidence[0].tolist() == pytest.approx([x.item() for x in expected])


def test_a_tied_hydra_trains_and_saves_its_mlps_alone(target):
    drafter = build(target)
    widths = [64 * (2 + k) for k in range(HEADS)]
    expected = sum(2 * (width * 64 + 64) + 64 * 64 + 64 for width in widths)
    assert num_trainable(drafter) == expected
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"heads"}


def test_more_drafts_than_heads_are_refused(target):
    drafter = build(target)
    state, _, _ = after(drafter, target)
    with pytest.raises(ConfigError, match=r"num_draft_tokens=4 is more than .* num_heads=3"):
        propose(drafter, state, depth=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 2}, "num_heads=2 is below num_draft_tokens=3"),
        ({"head_rank": 8}, "head_rank=8 with head=tied"),
        ({"head": "low_rank"}, "head_rank=None with head=low_rank"),
        ({"head_decay": None}, "head_decay=None with position_weights=decay"),
        ({"objective": "kl"}, "objective='kl': expected one of"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_a_rank_above_the_width_is_refused(target):
    with pytest.raises(ConfigError, match="head_rank=65 exceeds the target's hidden size 64"):
        build(target, head="low_rank", head_rank=65)
