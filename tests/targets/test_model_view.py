import copy

import pytest
import torch

from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.targets.features import FeatureRequest
from draftlab.targets.step import Step
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def last_column(target, ids):
    """Whole pass of one row: final state and logits, as normal tensors."""
    out = target.forward_plainly(ids, FeatureRequest(wants_final=True))
    return out.features.final.clone(), out.logits.clone()


def test_head_of_final_is_the_models_logits(target, random_ids):
    final, logits = last_column(target, random_ids(2, 7))
    torch.testing.assert_close(target.view.head(final), logits, rtol=0, atol=1e-9)


def test_the_final_norm_is_applied_once(random_ids):
    model = build_tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(0))
    target = build_target(model, tiny_tokenizer(), name="x", source="tiny")
    request = FeatureRequest((4,), wants_final=True)
    out = target.forward_plainly(random_ids(1, 9), request)
    tap, final = out.features.taps[:, :, 0], out.features.final
    expected = out.logits.softmax(-1)

    def error(states):
        return float((target.view.head(states).softmax(-1) - expected).abs().max())

    assert error(final) < 1e-5
    assert error(target.view.final_norm(tap)) < 1e-5
    assert error(tap) > 1e-2
    assert error(target.view.final_norm(final)) > 1e-2


def test_embed_holds_the_targets_scale(targets):
    gemma = targets("gemma3")
    ids = torch.tensor([[3, 5]])
    rows = gemma.model.get_input_embeddings().weight[ids]
    torch.testing.assert_close(gemma.view.embed(ids), rows * 8.0)  # sqrt of 64
    llama = targets("llama")
    assert torch.equal(llama.view.embed(ids), llama.model.get_input_embeddings().weight[ids])


def test_head_rows_copies_named_rows_and_lends_the_whole(targets):
    view = targets("llama").view
    whole = view.head_rows(None)
    some = view.head_rows(torch.tensor([7, 3]))
    assert torch.equal(some, whole[[7, 3]])
    some.zero_()
    assert whole[7].abs().max() > 0


@pytest.mark.parametrize("kind", ROPES)
def test_rope_tables_are_the_targets_own(kind, random_ids):
    target = tiny_target("llama", rope_parameters=ROPES[kind], max_position_embeddings=256)
    positions = torch.tensor([0, 63, 64, 255])
    cos, sin = target.view.rope(positions)
    expected = target.model.model.rotary_emb(torch.zeros(1), positions.unsqueeze(0))
    assert torch.equal(cos, expected[0][0])
    assert torch.equal(sin, expected[1][0])
    assert cos.dtype is torch.float32
    assert target.view.config["rope_parameters"]["rope_type"] == kind


def test_scaled_rope_tables_differ_from_plain_ones():
    positions = torch.tensor([255])
    tables = {
        kind: tiny_target("llama", rope_parameters=rope).view.rope(positions)[0]
        for kind, rope in ROPES.items()
    }
    for kind in ("linear", "llama3", "yarn"):
        assert (tables[kind] - tables["default"]).abs().max() > 0.05


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3", "mistral", "gpt_oss"])
def test_rope_rotates_keys_as_the_target_does(targets, random_ids, run_chain, family):
    """Keys in memory, read back, equal our own rotation of the projected, normed states."""
    target = targets(family)
    view, text = target.view, random_ids(6)
    kv = target.open_kv(1, 6)
    layer = 1 if family in ("gemma3", "gpt_oss") else 0  # the first full-attention layer
    request = FeatureRequest((1,)) if layer else FeatureRequest()
    out = run_chain(target, kv, [text], [0], 6, request=request)
    module = target.model.model.layers[layer]
    with torch.inference_mode():
        hidden = out.features.taps[:, :, 0] if layer else view.embed(text.unsqueeze(0))
        keys = module.self_attn.k_proj(module.input_layernorm(hidden)).view(1, 6, 2, 16)
        if hasattr(module.self_attn, "k_norm"):
            keys = module.self_attn.k_norm(keys)
        cos, sin = (t.view(1, 6, 1, -1).to(keys.dtype) for t in view.rope(torch.arange(6)))
        first, second = keys.chunk(2, -1)
        rotated = keys * cos + torch.cat([-second, first], -1) * sin
    torch.testing.assert_close(rotated[0], kv.data[layer, 0, 0], rtol=0, atol=1e-6)


def test_a_target_without_rotary_positions_says_so(targets):
    with pytest.raises(UnsupportedTarget, match=r"gpt2.*no rotary positions"):
        targets("gpt2").view.rope(torch.arange(3))


def test_positions_of_any_shape_are_served(targets):
    cos, sin = targets("llama").view.rope(torch.arange(12).reshape(3, 4))
    assert cos.shape == sin.shape == (3, 4, 16)


def test_layer_state_has_the_usual_names(targets):
    state = targets("llama").view.layer_state(2)
    assert {"self_attn.q_proj.weight", "mlp.gate_proj.weight", "input_layernorm.weight"} <= set(
        state
    )
    with pytest.raises(ConfigError, match=r"0\.\.3"):
        targets("llama").view.layer_state(4)


def test_config_uses_shared_names_for_every_family(target):
    config = target.view.config
    assert config["hidden_size"] == 64
    assert config["num_attention_heads"] == 4
    assert config["head_dim"] == 16
    assert config["num_key_value_heads"] in (2, 4)
    assert config["max_position_embeddings"] == 512
    assert config["intermediate_size"] > 0
    assert isinstance(config["hidden_act"], str)
    assert config["rms_norm_eps"] > 0
    if config["model_type"] != "gpt2":
        assert "rope_type" in config["rope_parameters"]


def test_running_all_layers_is_running_the_target(target, tolerance, random_ids):
    ids = random_ids(2, 6)
    step = Step(torch.arange(2), ids, torch.zeros(2, dtype=torch.long), 6)
    kv = target.open_kv(2, 8)
    expected = target.run(kv, step, request=FeatureRequest((4,))).features.taps[:, :, 0]
    kept = kv.data.clone()
    found = target.view.run_layers(kv, step, (0, 1, 2, 3))
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert torch.equal(kv.data, kept)


def test_running_some_layers_is_a_model_of_those_layers(random_ids):
    target = tiny_target("llama")
    shallow = copy.deepcopy(build_tiny_model("llama"))
    shallow.model.layers = torch.nn.ModuleList([shallow.model.layers[i] for i in (0, 2)])
    shallow.config.num_hidden_layers = 2
    ids = random_ids(1, 6)
    with torch.no_grad():
        expected = shallow(ids, use_cache=False).logits
    step = Step(torch.tensor([0]), ids, torch.tensor([0]), 6)
    kv = target.open_kv(1, 8)
    hidden = target.view.run_layers(kv, step, (0, 2))
    with torch.inference_mode():
        logits = target.view.head(target.view.final_norm(hidden))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert kv.data[1].abs().max() == 0  # a skipped layer's memory is left alone
    assert kv.data[3].abs().max() == 0


def test_the_target_is_whole_again_after_some_layers_ran(targets, random_ids, run_chain):
    target, text = targets("llama"), random_ids(5)
    kv = target.open_kv(1, 8)
    before = run_chain(target, kv, [text], [0], 5).logits
    step = Step(torch.tensor([0]), text.unsqueeze(0), torch.tensor([0]), 5)
    target.view.run_layers(kv, step, (1,))
    assert torch.equal(before, run_chain(target, kv, [text], [0], 5).logits)


@pytest.mark.parametrize("layers", [(), (2, 1), (0, 4), (-1,)])
def test_layers_out_of_range_or_order_are_refused(targets, random_ids, layers):
    target = targets("llama")
    step = Step(torch.tensor([0]), random_ids(1, 2), torch.tensor([0]), 2)
    with pytest.raises(ConfigError, match=r"0\.\.3"):
        target.view.run_layers(target.open_kv(1, 4), step, layers)
