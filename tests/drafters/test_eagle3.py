"""What an EAGLE-3 head learns from, how it starts, and what it hands out."""

import dataclasses

import pytest
import torch
from building import REDUCED, build, settings
from eagle_kit import features_of, make_batch, random_tokens, reference_pass

from draftlab.drafters._taps import default_taps
from draftlab.drafters.store import build_drafter
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.targets.tiny import tiny_target


def test_a_prediction_counts_exactly_when_the_token_predicted_is_learned(target):
    """Case O-06: alternate learned and other tokens; the first answer token after a prompt counts."""
    drafter = build("eagle3", target, unroll_steps=4)
    ids = random_tokens(16, 5)
    batch = make_batch([(ids, 0)], 16)
    learned = [3, 4, 5, 9, 10, 15]
    batch.loss_mask[:] = False
    batch.loss_mask[0, learned] = True
    features = target.read_features(batch, drafter.needs)
    loss = drafter(batch, features, Noise(0))
    expected = [sum(u - 2 - s >= 0 for u in learned) for s in range(4)]
    assert loss.count.tolist() == expected

    # which rows' laws matter: change the target's law at one position and see who notices
    for u in range(1, 16):
        final = features.final.clone()
        final[0, u - 1] = -final[0, u - 1]  # judges token u
        changed = drafter(batch, dataclasses.replace(features, final=final), Noise(0))
        noticed = (changed.loss_sum - loss.loss_sum).abs() > 1e-9
        assert noticed.tolist() == [u in learned and u - 2 - s >= 0 for s in range(4)], u


def test_default_taps_are_what_servers_assume_and_stay_apart_in_shallow_targets():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(7) == (2, 3, 4)
    for count in range(1, 7):
        taps = default_taps(count)
        assert list(taps) == sorted(set(taps))
        assert 1 <= taps[0] <= taps[-1] == count


def test_a_warm_start_repeats_the_target_layer_on_the_hidden_half(target):
    """With no embedding half, the head's layer on a target state is the target's own layer."""
    drafter = build("eagle3", target, init_from_layer=-1, init_noise=0.0, fc_norm=False)
    own = target.view.layer_state(3)
    layer = drafter.layers[0]
    assert layer.self_attn.q_proj.weight[:, 64:].equal(own["self_attn.q_proj.weight"])
    assert (layer.self_attn.q_proj.weight[:, :64] == 0).all()
    assert layer.hidden_norm.weight.equal(own["input_layernorm.weight"])
    features = features_of(target, drafter, random_tokens(6, 1))
    assert torch.allclose(drafter._join(features.taps), features.taps[..., -1, :])
    assert torch.allclose(
        drafter.norm(features.taps[0, :, -1]), target.view.final_norm(features.taps[0, :, -1])
    )


def test_a_warm_started_head_continues_the_target(target):
    """Fed with the tap below the last layer, it computes what the last layer computes."""
    drafter = build(
        "eagle3", target, init_from_layer=3, init_noise=0.0, fc_norm=False, tap_layers=[3]
    )
    ids = random_tokens(8, 1)
    features = features_of(target, drafter, ids)
    batch = make_batch([(ids, 0)], 8)
    out = reference_pass(
        drafter, target.view.embed(torch.tensor(ids)), drafter._join(features.taps)[0]
    )
    assert torch.allclose(drafter.norm(out), features.final[0], atol=1e-5)
    assert torch.isfinite(drafter(batch, features, Noise(0)).total)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt2", "has attn.c_attn"),
        ("gemma3", "has post_feedforward_layernorm"),
        ("qwen3", "has self_attn.k_norm"),
    ],
)
def test_layers_that_cannot_start_a_head_are_refused_with_the_reason(family, why):
    with pytest.raises(ConfigError, match=why):
        build("eagle3", tiny_target(family), init_from_layer=0)


@pytest.mark.parametrize("layer", [4, -5])
def test_a_start_layer_the_target_does_not_have_is_refused(target, layer):
    with pytest.raises(ConfigError, match=f"init_from_layer={layer}"):
        build("eagle3", target, init_from_layer=layer)


def test_the_target_is_neither_trained_nor_saved_with_the_head(target):
    drafter = build("eagle3", target, REDUCED)
    assert not any("lm_head" in name or "embed" in name for name in drafter.state_dict())
    assert "lm_head" in build("eagle3", target, REDUCED, train_head=True).state_dict()


def test_equal_seeds_build_equal_heads(target):
    one, two = (build_drafter(settings("eagle3"), target.view, seed=3) for _ in range(2))
    other = build_drafter(settings("eagle3"), target.view, seed=4)
    assert one.fc.weight.equal(two.fc.weight)
    assert not one.fc.weight.equal(other.fc.weight)


def test_serving_weights_name_what_servers_load(target):
    weights = build("eagle3", target, REDUCED).serving_weights()
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    layer |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {
        f"layers.0.{n}.weight"
        for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(weights.tensors) == layer | norms | rest
    assert weights.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert weights.tensors["fc.weight"].shape == (64, 192)
    size = len(REDUCED)
    assert (torch.arange(size) + weights.tensors["d2t"]).equal(REDUCED)
    assert weights.tensors["t2d"].nonzero().flatten().equal(REDUCED)
    assert weights.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert weights.config["draft_vocab_size"] == size
    assert weights.config["tap_layers"] == [1, 2, 4]
    assert weights.config["rope_parameters"]["rope_theta"] == 10000.0


def test_a_whole_vocabulary_ships_no_map_and_a_frozen_head_no_rows(target):
    weights = build("eagle3", target).serving_weights()
    assert not {"d2t", "t2d", "lm_head.weight"} & set(weights.tensors)
    assert weights.config["draft_vocab_size"] == target.spec.vocab_size
    assert "lm_head.weight" in build("eagle3", target, train_head=True).serving_weights().tensors
