import json

import pytest
import torch
from replayed_head import ReplayedEagle3, read_folder
from transformers import LlamaConfig

from draftlab.drafters.base import ServingWeights
from draftlab.errors import NotExportable
from draftlab.export._eagle3 import eagle3_config
from draftlab.export.base import export_drafter
from draftlab.targets.tiny import build_tiny_model, tiny_target

PROMPT = [3, 17, 99, 42, 250, 8, 61]
PLAIN = dict(fc_norm=False, norm_output=False, norm_before_residual=False, norm_before_fc=False)
SWITCHES = {
    "all_off": {},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "eagle_3.1": {"fc_norm": True, "norm_output": True},
    "all_on": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two_layers": {"num_layers": 2, "norm_output": True},
    "two_taps": {"tap_layers": [1, 4]},
    "window": {"num_layers": 2, "sliding_window": 4},
    "own_width": {"intermediate_size": 48},
    "reduced": {"draft_vocab_size": 96},
    "reduced_own_head": {"draft_vocab_size": 96, "train_head": True},
    "own_head": {"train_head": True},
}


def replay(target, folder, seen, next_ids, tokens):
    head = ReplayedEagle3(folder, target.view.embed)
    with torch.no_grad():
        return head, head.draft(seen.taps[0], next_ids, tokens)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_plain_reader_of_the_folder_computes_the_trained_draft_logits_over_three_steps(
    name, target, build, drafted, settings, tmp_path
):
    drafter = build("eagle3", **(PLAIN | SWITCHES[name]))
    seen, next_ids, tokens, log_probs, law_ids = drafted(target, drafter)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    head, logits = replay(target, tmp_path / "out", seen, next_ids, tokens)
    if law_ids is not None:
        ids = head.target_ids()[: law_ids.shape[-1]]
        assert torch.equal(law_ids[0, 0], ids)
    told = logits[:, : log_probs.shape[-1]].log_softmax(-1).clamp_min(-80)
    torch.testing.assert_close(told, log_probs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"]
)
def test_one_switch_changes_the_config_and_the_logits_of_the_folder(
    name, target, build, drafted, settings, tmp_path
):
    found = []
    for value in (False, True):
        drafter = build("eagle3", **(PLAIN | {name: value}))
        seen, next_ids, _, _, _ = drafted(target, drafter)
        export_drafter(drafter, target.view, settings(), tmp_path / str(value))
        fixed = torch.tensor([5, 6, 7])
        head, logits = replay(target, tmp_path / str(value), seen, next_ids, fixed)
        found.append((head.config, logits))
    (off, off_logits), (on, on_logits) = found
    assert off[name] is False
    assert on[name] is True
    assert (on_logits[1:] - off_logits[1:]).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "mistral"])
def test_the_head_of_another_family_reads_back_the_same(family, build, drafted, settings, tmp_path):
    other = tiny_target(family, dtype=torch.float32)
    drafter = build("eagle3", on=other)
    seen, next_ids, tokens, log_probs, _ = drafted(other, drafter)
    export_drafter(drafter, other.view, settings(), tmp_path / "out")
    _, logits = replay(other, tmp_path / "out", seen, next_ids, tokens)
    told = logits[:, : log_probs.shape[-1]].log_softmax(-1).clamp_min(-80)
    torch.testing.assert_close(told, log_probs, atol=1e-4, rtol=1e-4)


def test_the_layer_numbers_in_the_config_name_the_features_the_head_was_trained_on(
    target, build, drafted, settings, tmp_path
):
    drafter = build("eagle3", tap_layers=[1, 3])
    _, next_ids, tokens, log_probs, _ = drafted(target, drafter)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    model = build_tiny_model(dtype=torch.float32)
    head = ReplayedEagle3(tmp_path / "out", model.get_input_embeddings())
    with torch.no_grad():
        passed = model(torch.tensor([PROMPT[:-1]]), output_hidden_states=True).hidden_states
        ids = head.config["eagle_aux_hidden_state_layer_ids"]
        taps = torch.stack([passed[k][0] for k in ids], dim=1)
        told = (
            head.draft(taps, next_ids, tokens)[:, : log_probs.shape[-1]]
            .log_softmax(-1)
            .clamp_min(-80)
        )
    torch.testing.assert_close(told, log_probs, atol=1e-4, rtol=1e-4)


def test_a_reduced_vocabulary_ships_offsets_and_a_mask_that_agree(
    target, build, settings, tmp_path
):
    drafter = build("eagle3", draft_vocab_size=96)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    d2t, t2d = weights["d2t"], weights["t2d"]
    assert config["draft_vocab_size"] == 96
    assert (d2t.dtype, tuple(d2t.shape)) == (torch.int64, (96,))
    assert (t2d.dtype, tuple(t2d.shape), int(t2d.sum())) == (torch.bool, (320,), 96)
    assert torch.equal(torch.arange(96) + d2t, t2d.nonzero().squeeze(1))
    special = {*target.spec.eos_ids, *target.tokenizer.all_special_ids}
    assert all(t2d[i] for i in special)
    assert torch.equal(weights["lm_head.weight"], target.view.head_rows(t2d.nonzero().squeeze(1)))


def test_the_whole_vocabulary_ships_the_head_and_no_map(target, build, settings, tmp_path):
    export_drafter(build("eagle3"), target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    assert not {"d2t", "t2d", "embed_tokens.weight"} & set(weights)
    assert weights["lm_head.weight"].shape == (320, 64)
    assert config["draft_vocab_size"] == config["vocab_size"] == 320


def test_the_config_says_everything_an_engine_would_guess_otherwise(
    target, build, settings, tmp_path
):
    drafter = build("eagle3", tap_layers=[1, 3])
    export_drafter(
        drafter, target.view, settings(), tmp_path / "out", history={"training_length": 64}
    )
    config, _ = read_folder(tmp_path / "out")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2]
    assert config["num_aux_hidden_states"] == 2
    for switch in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual"):
        assert isinstance(config[switch], bool)
    assert config["tie_word_embeddings"] is False
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["target_hidden_size"] == 64
    assert "layer_types" not in config
    assert config["draftlab"]["base_model"] == "tiny-llama"


def test_the_position_limit_is_the_targets_and_not_the_training_length(
    target, build, settings, tmp_path
):
    export_drafter(
        build("eagle3"), target.view, settings(), tmp_path / "out", history={"training_length": 64}
    )
    config, _ = read_folder(tmp_path / "out")
    assert config["max_position_embeddings"] == target.spec.max_positions == 512
    assert config["draftlab"]["training_length"] == 64


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({"tap_layers": [1, 2, 3]}, "this was not run there"),
        ({"tap_layers": [1, 2, 4]}, "Not for SGLang: it cannot read"),
        ({"norm_before_residual": True}, "Not for SGLang or TensorRT-LLM"),
        ({"num_layers": 2}, "Not for SGLang or TensorRT-LLM"),
    ],
)
def test_the_card_says_which_other_engines_would_compute_something_else(
    keys, note, target, build, settings, tmp_path
):
    export_drafter(build("eagle3", **keys), target.view, settings(), tmp_path / "out")
    assert note in (tmp_path / "out" / "README.md").read_text()


def test_scaled_rotary_positions_survive_the_config_class_of_transformers(
    build, settings, tmp_path
):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    scaled = tiny_target(dtype=torch.float32, rope_parameters=rope)
    export_drafter(build("eagle3", on=scaled), scaled.view, settings(), tmp_path / "out")
    found = LlamaConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert {key: found[key] for key in rope} == rope


def test_an_export_from_float64_is_written_in_a_dtype_that_engines_have(build, settings, tmp_path):
    wide = tiny_target(dtype=torch.float64)
    export_drafter(build("eagle3", on=wide), wide.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    assert config["dtype"] == "float32"
    assert weights["fc.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"norm_of_tomorrow": True}, "norm_of_tomorrow"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"fc_norm": True, "norm_before_fc": True}, "both on"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"norm_output": None}, "norm_output"),
    ],
)
def test_a_switch_that_vllm_does_not_serve_is_refused_by_name(change, named, target, build):
    own = build("eagle3").serving_weights()
    serving = ServingWeights("eagle3", {**own.config, **change}, own.tensors)
    with pytest.raises(NotExportable, match=named):
        eagle3_config(serving, target.view, None)


def test_a_switch_the_drafter_does_not_state_is_asked_for(target, build):
    own = build("eagle3").serving_weights()
    config = {key: value for key, value in own.config.items() if key != "norm_output"}
    with pytest.raises(NotExportable, match="does not say norm_output"):
        eagle3_config(ServingWeights("eagle3", config, own.tensors), target.view, None)


def test_a_tensor_without_a_place_or_with_nan_stops_the_export_and_leaves_nothing(
    target, build, settings, tmp_path, monkeypatch
):
    drafter = build("eagle3")
    own = drafter.serving_weights()
    broken = {
        **own.tensors,
        "foo.weight": torch.ones(2),
        "norm.weight": torch.full((64,), torch.nan),
    }
    monkeypatch.setattr(
        drafter, "serving_weights", lambda: ServingWeights("eagle3", own.config, broken)
    )
    with pytest.raises(
        NotExportable, match=r"foo\.weight is not in the table.*norm\.weight holds NaN"
    ):
        export_drafter(drafter, target.view, settings(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_maps_that_disagree_stop_the_export(target, build, settings, tmp_path, monkeypatch):
    drafter = build("eagle3", draft_vocab_size=96)
    own = drafter.serving_weights()
    absolute = {**own.tensors, "d2t": own.tensors["d2t"] + torch.arange(96)}
    monkeypatch.setattr(
        drafter, "serving_weights", lambda: ServingWeights("eagle3", own.config, absolute)
    )
    with pytest.raises(NotExportable, match="d2t and t2d disagree"):
        export_drafter(drafter, target.view, settings(), tmp_path / "out")


def test_the_config_is_plain_json(target, build, settings, tmp_path):
    export_drafter(build("eagle3"), target.view, settings(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLMEagle3"
    ]
