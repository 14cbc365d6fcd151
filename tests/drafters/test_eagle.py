"""What an EAGLE head holds, and what it hands out."""

from building import REDUCED, build

from draftlab.drafters.base import num_trainable


def test_the_head_is_small_and_holds_nothing_of_the_target(target):
    drafter = build("eagle", target)
    names = set(drafter.state_dict())
    assert {name.split(".")[0] for name in names} == {"fc", "layers"}
    assert "layers.0.input_layernorm.weight" not in names
    sizes = drafter.sizes
    attention = 2 * 64 * 64 + 2 * 64 * sizes.kv_heads * sizes.head_dim
    assert num_trainable(drafter) == 128 * 64 + attention + 3 * 64 * sizes.intermediate + 64


def test_serving_weights_name_what_servers_load(target):
    weights = build("eagle", target, num_layers=2).serving_weights()
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    layer |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {"layers.0.post_attention_layernorm.weight"}
    second = {name.replace(".0.", ".1.") for name in layer} | {"layers.1.input_layernorm.weight"}
    assert set(weights.tensors) == {"fc.weight"} | layer | second
    assert weights.tensors["fc.weight"].shape == (64, 128)
    assert not weights.config["fc_bias"]
    assert weights.config["draft_vocab_size"] is None
    reduced = build("eagle", target, REDUCED, fc_bias=True).serving_weights()
    assert reduced.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert reduced.tensors["token_map"].equal(REDUCED)
    assert "fc.bias" in reduced.tensors
