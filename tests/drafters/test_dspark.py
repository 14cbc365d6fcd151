"""DSpark: what the Markov and confidence heads add to a block, and what they may not see."""

import pytest
import torch
from block_kit import anchors_of, reference_block, support_of
from building import REDUCED, build
from eagle_kit import (
    features_of,
    make_batch,
    observe,
    opened,
    propose,
    random_tokens,
    samples,
    train_shortly,
)

from draftlab.drafters.tree import StaticTree
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import Sampling

SAMPLED = Sampling(temperature=1.5)


def spark(target, vocab_ids=None, **changes):
    return build("dspark", target, vocab_ids, stir=0.1, **changes)


def previous_of(drafter, token):
    """The r numbers a token is reduced to, by the definition of both choices."""
    if drafter.settings.markov_table:
        return drafter.markov_in.weight[token]
    return drafter.markov_in.weight @ drafter.target.embed(torch.tensor(token))


def logits_of(drafter, block, k, token):
    """Logits of slot k when `token` is the one before."""
    corrected = block[k] + drafter.markov_out.weight @ previous_of(drafter, token)
    return corrected @ drafter._head.rows.T


def acceptance_to_expect(drafter, block, k, token):
    joined = torch.cat([block[k], previous_of(drafter, token)])
    return (drafter.confidence.weight[0] @ joined + drafter.confidence.bias[0]).sigmoid()


# ---------------------------------------------------------------- training


def reference_loss(target, drafter, sample):
    """Losses of a sample block by block and their weights: the objective's, the confidence head's."""
    ids, learned = sample
    depths, decay = drafter.settings.block_size, drafter.settings.step_decay
    features = features_of(target, drafter, ids)
    main, weight, sure, judged = 0.0, 0.0, 0.0, 0.0
    for a in anchors_of(ids, learned):
        block = reference_block(drafter, features.taps[0, :a], ids[a], depths)
        for k in range(depths):
            token = a + 1 + k
            if token >= len(ids) or token < learned:
                continue
            logits = logits_of(drafter, block, k, ids[token - 1])
            scores = score_rows(
                objective(drafter.settings.objective),
                target.view.head(features.final[:, token - 1]),
                logits.unsqueeze(0),
                torch.tensor([ids[token]]),
                None if drafter.vocab is None else drafter.vocab.ids,
            )
            weight, main = weight + decay**k, main + decay**k * scores.loss[0]
            if (token - 1) % 8 == 0:
                told = acceptance_to_expect(drafter, block, k, ids[token - 1])
                wanted = scores.overlap[0].detach()
                missed = wanted * told.log() + (1 - wanted) * (1 - told).log()
                sure, judged = sure - decay**k * missed, judged + decay**k
    return main, weight, sure, judged


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("table", [True, False])
def test_the_loss_is_the_objective_and_the_confidence_s_given_the_true_token_before(
    target, table, vocab_ids
):
    drafter = spark(target, vocab_ids, markov_table=table, confidence_weight=0.6)
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    got = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = [reference_loss(target, drafter, sample) for sample in chosen]
    total = sum(
        main / weight + 0.6 * sure / max(judged, 1e-300) for main, weight, sure, judged in parts
    )
    assert got.total.item() == pytest.approx(total.item(), rel=1e-9)
    got.total.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    total.backward()
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, atol=1e-9), name


def test_in_a_mean_over_tokens_an_eighth_of_them_speaks_for_all_in_the_confidence_s_loss(target):
    drafter = spark(target, confidence_weight=0.6, normalise="token")
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    got = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = [reference_loss(target, drafter, sample) for sample in chosen]
    total = sum(main + 8 * 0.6 * sure for main, _, sure, _ in parts)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-9)
    assert got.weight.item() == pytest.approx(sum(weight for _, weight, _, _ in parts))


def test_training_lowers_the_loss_and_the_confidence_learns_the_acceptance(target):
    drafter = spark(target, num_layers=1, objective="forward_kl", confidence_weight=1.0)
    losses = train_shortly(drafter, target)
    assert losses[-1].total < 0.2 * losses[0].total

    told, wanted = [], []
    for seed in range(4):
        ids = random_tokens(20, seed)
        found = features_of(target, drafter, ids)
        for a in (8, 16):  # an eighth of the positions is what it learned from
            block = reference_block(drafter, found.taps[0, :a], ids[a], 3)
            p = target.view.head(found.final[0, a]).softmax(-1)
            q = logits_of(drafter, block, 0, ids[a]).softmax(-1)
            wanted.append(torch.minimum(p, q).sum().item())
            told.append(acceptance_to_expect(drafter, block, 0, ids[a]).item())
    gaps = [abs(a - b) for a, b in zip(told, wanted, strict=True)]
    assert sum(gaps) / len(gaps) < 0.15


def test_both_small_heads_start_without_a_say(target):
    drafter = build("dspark", target)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 1)], [(0, 8)])
    tree = propose(drafter, state, [0], 3, SAMPLED, min_confidence=0.0)
    assert (tree.confidence == 0.5).all()
    again = propose(drafter, state, [0], 3, SAMPLED, seed=8)
    assert not tree.tokens.equal(again.tokens)
    assert torch.allclose(tree.law_probs, again.law_probs)


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("table", [True, False])
def test_each_law_is_the_one_given_the_tokens_drafted_before(target, table, vocab_ids):
    drafter = spark(target, vocab_ids, markov_table=table)
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    uniforms = torch.rand(2, 3, generator=torch.Generator().manual_seed(7))
    drawn = propose(drafter, state, [0, 2], 3, SAMPLED)
    greedy = propose(drafter, state, [0, 2], 3)
    ids = support_of(drafter)
    for row, text in enumerate((texts[1], texts[0])):
        taps = features_of(target, drafter, text[:-1]).taps[0]
        block = reference_block(drafter, taps, text[-1], 3)
        for tree in (drawn, greedy):
            before = text[-1]
            for k in range(3):
                logits = logits_of(drafter, block, k, before)[: len(ids)]
                before = tree.tokens[row, k].item()
                if tree is greedy:
                    assert before == ids[logits.argmax()]
                    continue
                law = (logits / 1.5).softmax(-1)
                assert torch.allclose(tree.law_probs[row, k], law, atol=1e-9)
                assert before == ids[(law.cumsum(0) > uniforms[row, k]).int().argmax()]


def test_the_confidence_of_a_node_never_sees_the_token_drawn_there(target):
    drafter = spark(target)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 1)], [(0, 8)])
    trees = [
        propose(drafter, state, [0], 3, SAMPLED, seed=s, min_confidence=0.0) for s in range(40)
    ]
    by_prefix = {}
    for tree in trees:
        for k in range(3):
            prefix = tuple(tree.tokens[0, :k].tolist())
            by_prefix.setdefault(prefix, set()).add(round(tree.confidence[0, k].item(), 12))
    assert len(trees[0].confidence[0].unique()) > 1
    assert all(len(told) == 1 for told in by_prefix.values())
    # and it does read the token before: other second tokens, other third confidences
    assert len({told.copy().pop() for prefix, told in by_prefix.items() if len(prefix) == 1}) > 1


def test_without_a_confidence_head_the_law_s_largest_probability_stands_in(target):
    drafter = spark(target, confidence_weight=0.0)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 1)], [(0, 8)])
    tree = propose(drafter, state, [0], 3, SAMPLED, min_confidence=0.0)
    assert torch.allclose(tree.confidence, tree.law_probs.max(-1).values)
    assert not any("confidence" in name for name in drafter.serving_weights().tensors)


def test_a_tree_s_children_follow_their_own_parent(target):
    drafter = spark(target)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    shape = StaticTree(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
    tree = propose(drafter, state, [0], 2, SAMPLED, tree=shape)
    taps = features_of(target, drafter, text[:-1]).taps[0]
    block = reference_block(drafter, taps, text[-1], 3)
    known = target.spec.num_token_ids
    for node in (2, 3):
        parent = tree.tokens[0, node - 2].item()
        law = (logits_of(drafter, block, 1, parent)[:known] / 1.5).softmax(-1)
        assert torch.allclose(tree.law_probs[0, node], law, atol=1e-9)
    assert not torch.allclose(tree.law_probs[0, 2], tree.law_probs[0, 3], atol=1e-3)


# ---------------------------------------------------------------- construction, serving


def test_a_block_has_a_draft_token_for_every_slot(target):
    assert spark(target).max_draft_tokens == 3


@pytest.mark.parametrize("table", [True, False])
def test_served_tables_say_what_the_drafter_says(target, table):
    drafter = spark(target, REDUCED, markov_table=table)
    weights = drafter.serving_weights()
    tables = weights.tensors["markov_in.weight"], weights.tensors["markov_out.weight"]
    assert tables[0].shape == (320, 8)
    assert tables[1].shape == (len(REDUCED), 8)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).double()
    for token in (3, 200, 300):
        expected = logits_of(drafter, hidden, 2, token)
        got = hidden[2] @ weights.tensors["lm_head.weight"].T + tables[1] @ tables[0][token]
        assert torch.allclose(got, expected)
    assert weights.tensors["confidence.weight"].shape == (1, 64 + 8)
    assert weights.config["sample_from_anchor"] is True
