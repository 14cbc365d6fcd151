"""The EAGLE head against a slow reference: one causal pass over everything a draft row may see."""

from pathlib import Path

import pytest
import torch
import yaml
from eagle_kit import (
    drafter_ids,
    expected_chain,
    features_of,
    make_batch,
    observe,
    opened,
    paths_of,
    propose,
    random_tokens,
    reference_states,
    replayed_laws,
    samples,
)
from torch.nn.functional import smooth_l1_loss

from draftlab.drafters.base import num_trainable
from draftlab.drafters.eagle import Eagle, EagleSettings
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import Sampling
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

YAML = Path(__file__).parents[2] / "conf" / "drafter" / "eagle.yaml"
REDUCED = torch.tensor([i for i in range(261) if i % 3 or i == 256])
SAMPLED = Sampling(temperature=0.7)
BUSHY = StaticTree(parents=(-1, -1, 0, 0, 1, 2, 2, 4), ranks=(0, 1, 0, 1, 0, 0, 1, 0))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    return parse_settings(EagleSettings, {**yaml.safe_load(YAML.read_text()), **changes})


def build(target, vocab_ids=None, seed=0, **changes):
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, target.spec.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Eagle(settings(**{"feature_noise": 0.0} | changes), target.view, vocab=vocab)


def reference_loss(target, drafter, one_sample):
    """Loss of one sample by running the decode-time chain at every position, token by token."""
    ids, learned = one_sample
    steps = drafter.settings.hass_steps
    features = features_of(target, drafter, ids)
    allowed = drafter_ids(drafter)
    total, weight = 0.0, 0
    losses, hits, counts = ([0.0] * steps for _ in range(3))
    for t in range(len(ids)):
        depths = [s for s in range(steps) if t + 2 + s < len(ids) and t + 2 + s >= learned]
        if not depths:
            continue
        states = reference_states(drafter, features, ids, t, max(depths) + 1)
        for s in depths:
            true = features.final[0, t + 1 + s]
            p = target.view.head(true).softmax(-1)
            q = (states[s] @ drafter.head.rows.T).softmax(-1)
            kept = p[allowed] / p[allowed].sum()
            likely = kept.topk(10).indices
            law = 0.1 * (kept * (kept / q).log()).sum() - (kept * q.log())[likely].sum()
            if ids[t + 2 + s] not in allowed:
                law = 0 * law
            loss = law + 2.0 * smooth_l1_loss(states[s], true)
            total, weight = total + loss, weight + 1
            if drafter.vocab is not None and (t + 1 + s) % 8:
                continue  # a reduced vocabulary is judged at every eighth position
            losses[s] += loss.item()
            hits[s] += int(allowed[q.argmax()] == p.argmax())
            counts[s] += 1
    return total / weight, losses, hits, counts


VARIANTS = {
    "default": {},
    "two layers": {"num_layers": 2, "fc_bias": True},
    "EAGLE-1": {"hass_steps": 1},
}


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loss_is_that_of_the_decode_time_chain_everywhere(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, feature_weight=2.0, **VARIANTS[variant])
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = [reference_loss(target, drafter, sample) for sample in chosen]
    assert loss.total.item() == pytest.approx(sum(part[0].item() for part in parts), rel=1e-9)
    for i, got in enumerate((loss.loss_sum, loss.hit_sum, loss.count), start=1):
        assert torch.allclose(got, torch.tensor([part[i] for part in parts]).double().sum(0))


def test_gradients_stay_within_a_depth_as_hass_trains(target):
    """The reference detaches what is fed back; letting it flow gives other gradients."""
    drafter = build(target, REDUCED, feature_weight=2.0, num_layers=2)
    batch = make_batch(samples(), 18)
    drafter(batch, target.read_features(batch, drafter.needs), Noise(0)).total.backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    sum(reference_loss(target, drafter, sample)[0] for sample in samples()).backward()
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(got[name], parameter.grad, atol=1e-10), name


def test_training_brings_features_and_laws_nearer_to_the_targets(target):
    drafter = build(target, hass_steps=2)
    batch = make_batch([(random_tokens(20, seed), 4) for seed in range(4)], 40)
    features = target.read_features(batch, drafter.needs)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = drafter(batch, features, Noise(0))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss)
    assert losses[-1].total < 0.5 * losses[0].total
    assert (losses[-1].overlap_sum > losses[0].overlap_sum + 5).all()


def test_feature_noise_is_on_in_training_only_and_repeats_with_its_key(target):
    drafter = build(target, feature_noise=0.5)
    batch = make_batch(samples(), 18)
    features = target.read_features(batch, drafter.needs)
    calm = drafter.eval()(batch, features, Noise(0)).total
    drafter.train()
    assert drafter(batch, features, Noise(0)).total == drafter(batch, features, Noise(0)).total
    assert drafter(batch, features, Noise(0)).total != calm
    assert drafter(batch, features, Noise(0)).total != drafter(batch, features, Noise(1)).total


def test_nothing_to_learn_gives_zero_and_a_gradient_for_every_parameter(target):
    drafter = build(target, fc_bias=True)
    batch = make_batch([(random_tokens(6, 1), 6)], 6)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert loss.total.item() == 0
    assert loss.count.sum() == 0
    assert all(p.grad is not None for p in drafter.parameters())


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", ["default", "two layers"])
def test_greedy_proposals_are_the_chain_that_training_unrolled(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, **VARIANTS[variant])
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    tree = propose(drafter, state, [0, 2], 4)
    assert tree.num_nodes.tolist() == [4, 4]
    assert tree.tokens[0].tolist() == expected_chain(drafter, target, texts[1], 4)
    assert tree.tokens[1].tolist() == expected_chain(drafter, target, texts[0], 4)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", ["default", "two layers"])
def test_every_node_of_a_tree_is_what_a_chain_along_its_path_would_say(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, **VARIANTS[variant])
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    drawn = propose(drafter, state, [0, 2], 4, SAMPLED, tree=BUSHY)
    dynamic = propose(drafter, state, [0, 2], 4, tree=DynamicTree(9, 3, 4))
    columns = {int(token): i for i, token in enumerate(drawn.law_ids[0, 0])}
    for row, text in enumerate(reversed(texts)):
        laws = replayed_laws(drafter, target, text, paths_of(drawn, row), temperature=0.7)
        for node, law in enumerate(laws):
            for sibling in range(node):
                if BUSHY.parents[sibling] == BUSHY.parents[node]:
                    law[columns[int(drawn.tokens[row, sibling])]] = 0
            assert torch.allclose(drawn.law_probs[row, node], law / law.sum(), atol=1e-10)
        laws = replayed_laws(drafter, target, text, paths_of(dynamic, row))
        for node, law in enumerate(laws):
            own = law[columns[int(dynamic.tokens[row, node])]]
            assert abs(dynamic.confidence[row, node] - own) < 1e-10


@pytest.mark.parametrize("num_accepted", range(4))
def test_an_accepted_path_equals_a_fresh_prefill(target, num_accepted):
    drafter = build(target, num_layers=2)
    text = random_tokens(12, 30)
    state, fresh = opened(drafter, target), opened(drafter, target)
    observe(drafter, state, target, [0], [text[:7]], [(0, 6)])
    propose(drafter, state, [0], 4, tree=BUSHY)  # leaves its own keys behind, all to be dropped
    longer = text[: 7 + num_accepted + 1]
    observe(drafter, state, target, [0], [longer], [(6, 6 + num_accepted + 1)])
    observe(drafter, fresh, target, [0], [longer], [(0, 6 + num_accepted + 1)])
    assert torch.allclose(state.logits[0], fresh.logits[0])
    assert propose(drafter, state, [0], 4).tokens.equal(propose(drafter, fresh, [0], 4).tokens)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral", "gpt2", "gpt_oss"])
def test_every_family_trains_and_drafts(family):
    other = tiny_target(family)
    drafter = build(other)
    batch = make_batch(samples(), 18)
    loss = drafter(batch, other.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert torch.isfinite(loss.total)
    state = opened(drafter, other)
    observe(drafter, state, other, [0], [random_tokens(9, 4)], [(0, 8)])
    assert propose(drafter, state, [0], 3).num_nodes.tolist() == [3]


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"objective='kl'.*forward_kl"):
        settings(objective="kl")


def test_the_head_is_small_and_holds_nothing_of_the_target(target):
    drafter = build(target)
    names = set(drafter.state_dict())
    assert {name.split(".")[0] for name in names} == {"fc", "layers"}
    assert "layers.0.input_layernorm.weight" not in names
    sizes = drafter.sizes
    attention = 2 * 64 * 64 + 2 * 64 * sizes.kv_heads * sizes.head_dim
    assert num_trainable(drafter) == 128 * 64 + attention + 3 * 64 * sizes.intermediate + 64


def test_serving_weights_name_what_servers_load(target):
    weights = build(target, num_layers=2).serving_weights()
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    layer |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {"layers.0.post_attention_layernorm.weight"}
    second = {name.replace(".0.", ".1.") for name in layer} | {"layers.1.input_layernorm.weight"}
    assert set(weights.tensors) == {"fc.weight"} | layer | second
    assert weights.tensors["fc.weight"].shape == (64, 128)
    assert not weights.config["fc_bias"]
    assert weights.config["draft_vocab_size"] is None
    reduced = build(target, REDUCED, fc_bias=True).serving_weights()
    assert reduced.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert reduced.tensors["token_map"].equal(REDUCED)
    assert "fc.bias" in reduced.tensors
