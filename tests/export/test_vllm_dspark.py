"""DSpark folders against what vLLM 0.32.0 loads: Qwen3DSparkForCausalLM, its config, its names."""

import json
import shlex

import pytest
import torch
from replayed_head import read_folder
from replayed_parallel import ReplayedDSpark

from draftlab.drafters.base import DraftBudget, Observation, ServingWeights
from draftlab.errors import NotExportable
from draftlab.export._dspark import dspark_config
from draftlab.export.base import export_drafter
from draftlab.sampling import Sampling
from draftlab.targets.tiny import tiny_target

KEYS = {"num_layers": 1, "block_size": 5, "num_draft_tokens": 5, "markov_rank": 16}
REDUCED = {"draft_vocab_size": 96, "mask_token_id": 7, "tap_layers": [1, 4]}
# width 64, 4 query and 2 key heads of 16, MLP 128, 320 rows, 4 layers: `tiny-llama`
LAYER = {
    "layers.0.input_layernorm.weight": (64,),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.self_attn.q_proj.weight": (64, 64),
    "layers.0.self_attn.k_proj.weight": (32, 64),
    "layers.0.self_attn.v_proj.weight": (32, 64),
    "layers.0.self_attn.o_proj.weight": (64, 64),
    "layers.0.self_attn.q_norm.weight": (16,),
    "layers.0.self_attn.k_norm.weight": (16,),
    "layers.0.mlp.gate_proj.weight": (128, 64),
    "layers.0.mlp.up_proj.weight": (128, 64),
    "layers.0.mlp.down_proj.weight": (64, 128),
    "hidden_norm.weight": (64,),
    "norm.weight": (64,),
}
# read in vLLM 0.32.0: model_executor/models/qwen3_dspark.py and qwen3_dflash.py
WHOLE_TENSORS = LAYER | {
    "fc.weight": (64, 4 * 64),
    "embed_tokens.weight": (320, 64),
    "markov_head.markov_w1.weight": (320, 16),
    "markov_head.markov_w2.weight": (320, 16),
    "confidence_head.proj.weight": (1, 64 + 16),
    "confidence_head.proj.bias": (1,),
}
REDUCED_TENSORS = LAYER | {
    "fc.weight": (64, 2 * 64),
    "lm_head.weight": (96, 64),
    "d2t": (96,),
    "t2d": (320,),
    "markov_head.markov_w1.weight": (320, 16),
    "markov_head.markov_w2.weight": (96, 16),
    "confidence_head.proj.weight": (1, 64 + 16),
    "confidence_head.proj.bias": (1,),
}
# read in vLLM 0.32.0: config/speculative.py, v1/worker/gpu/spec_decode/{utils,eagle/eagle3_utils,
# dspark/speculator}.py and the two model files
WHOLE_CONFIG = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "sample_from_anchor": True,
    "dspark_bonus_anchor": False,
    "block_size": 5,
    "mask_token_id": 319,
    "target_layer_ids": [0, 1, 2, 3],
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 320,
    "vocab_size": 320,
    "dflash_config": {"causal": False, "use_swa": False},
}
REDUCED_CONFIG = WHOLE_CONFIG | {
    "mask_token_id": 7,
    "target_layer_ids": [0, 3],
    "draft_vocab_size": 96,
}


@pytest.mark.parametrize(
    ("keys", "names", "fields"),
    [({}, WHOLE_TENSORS, WHOLE_CONFIG), (REDUCED, REDUCED_TENSORS, REDUCED_CONFIG)],
    ids=["whole", "reduced"],
)
def test_the_folder_holds_the_names_shapes_and_fields_that_vllm_reads_and_no_others(
    keys, names, fields, target, build, settings, tmp_path
):
    export_drafter(build("dspark", **KEYS | keys), target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    assert {name: tuple(t.shape) for name, t in weights.items()} == names
    assert {key: config.get(key) for key in fields} == fields
    # vLLM would take these before the ones above
    assert not {"eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids"} & set(config)
    assert "is_causal" not in config


def test_a_sliding_window_is_said_where_vllm_looks_for_it(target, build, settings, tmp_path):
    drafter = build("dspark", **KEYS, causal=True, sliding_window=6)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    config, _ = read_folder(tmp_path / "out")
    assert config["dflash_config"] == {"causal": True, "use_swa": True, "swa_window_size": 6}
    assert config["layer_types"] == ["sliding_attention"]


def test_a_head_without_confidence_says_so_and_ships_none(target, build, settings, tmp_path):
    drafter = build("dspark", **KEYS, confidence_weight=0.0)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    assert config["enable_confidence_head"] is False
    assert not [name for name in weights if "confidence" in name]
    assert "adaptive_verification" not in (tmp_path / "out" / "README.md").read_text()


def test_a_plain_reader_of_the_folder_is_as_sure_as_the_drafter(target, build, settings, tmp_path):
    drafter = build("dspark", **KEYS)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([[3, 17, 99, 42, 250, 8]])
    taps = torch.randn(1, 6, 4, 64, generator=generator)
    rows, count = torch.tensor([0]), torch.tensor([6])
    next_ids = torch.cat([ids[:, 1:], torch.tensor([[61]])], dim=1)
    state = drafter.open(1, 64, target.open_kv(1, 64))
    drafter.observe(state, Observation(rows, ids, count, next_ids, taps, None))
    budget = DraftBudget(rows, 4, Sampling(temperature=0.0), min_confidence=1e-9)
    tree = drafter.propose(state, budget, torch.zeros(1, 4))
    network = ReplayedDSpark(tmp_path / "out", target.view.embed, target.view.head_rows(None))
    told = network.confidence(taps[0], next_ids[0], tree.tokens[0])
    torch.testing.assert_close(tree.confidence[0], told, atol=1e-5, rtol=1e-5)


def test_the_command_names_the_method_and_a_whole_block(target, build, settings, tmp_path):
    result = export_drafter(build("dspark", **KEYS), target.view, settings(), tmp_path / "out")
    asked = json.loads(shlex.split(result.serve_command)[-1])
    assert (asked["method"], asked["num_speculative_tokens"]) == ("dspark", 5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sample_from_anchor": False}, "sample_from_anchor=False"),
        ({"markov_gate": True}, "markov_gate"),
        ({"hidden_act": "gelu"}, "dspark network .* hidden_act='gelu'"),
    ],
)
def test_a_switch_that_vllm_does_not_serve_is_refused_by_name(change, named, target, build):
    own = build("dspark", **KEYS).serving_weights()
    serving = ServingWeights("dspark", {**own.config, **change}, own.tensors)
    with pytest.raises(NotExportable, match=named):
        dspark_config(serving, target.view, None)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_mask_token_of_a_target_that_scales_its_embedding_is_refused(
    kind, build, settings, tmp_path
):
    other = tiny_target("gemma3", dtype=torch.float32)
    keys = {"num_layers": 1, "block_size": 5, "num_draft_tokens": 4}
    drafter = build(kind, on=other, mask_token_id=7, **keys)
    with pytest.raises(NotExportable, match=r"gemma3.*drafter\.mask_token_id=null"):
        export_drafter(drafter, other.view, settings(), tmp_path / "out")
    export_drafter(build(kind, on=other, **keys), other.view, settings(), tmp_path / "out")
