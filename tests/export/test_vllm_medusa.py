import pytest
import torch
from replayed_head import read_folder, replay_medusa

from draftlab.drafters.base import ServingWeights
from draftlab.errors import ConfigError, NotExportable
from draftlab.export._medusa import medusa_config
from draftlab.export.base import export_drafter
from draftlab.targets.tiny import tiny_target

OWN = {"head": "own"}
LOW_RANK = {"head": "low_rank", "head_rank": 16}
CASES = {
    "tied": {},
    "own": OWN,
    "low_rank": LOW_RANK,
    "three_heads": {"num_heads": 3, "num_draft_tokens": 3} | OWN,
    "two_blocks": {"num_blocks": 2},
}


def assert_reads_back_the_same(target, drafter, drafted, folder):
    seen, _, _, log_probs, law_ids = drafted(target, drafter)
    ids = slice(0, log_probs.shape[-1]) if law_ids is None else law_ids[0, 0]
    told = replay_medusa(folder, seen.final[0, -1])[: log_probs.shape[0], ids]
    told = told[:, : target.spec.num_token_ids].log_softmax(-1).clamp_min(-80)
    torch.testing.assert_close(told, log_probs[:, : told.shape[-1]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_plain_reader_of_the_folder_computes_the_trained_heads(
    name, target, build, drafted, settings, tmp_path
):
    drafter = build("medusa", **CASES[name])
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    assert_reads_back_the_same(target, drafter, drafted, tmp_path / "out")


def test_heads_of_another_width_read_back_the_same(build, drafted, settings, tmp_path):
    wide = tiny_target(dtype=torch.float32, hidden_size=96, head_dim=24)
    drafter = build("medusa", on=wide, num_blocks=2)
    export_drafter(drafter, wide.view, settings(), tmp_path / "out")
    assert read_folder(tmp_path / "out")[1]["blocks.3.layers.1.weight"].shape == (96, 96)
    assert_reads_back_the_same(wide, drafter, drafted, tmp_path / "out")


def test_the_config_holds_counts_vocabulary_layout_and_base_model(
    target, build, settings, tmp_path
):
    export_drafter(build("medusa", num_blocks=2), target.view, settings(), tmp_path / "out")
    config, _ = read_folder(tmp_path / "out")
    assert (config["num_heads"], config["num_hidden_layers"]) == (4, 2)
    assert (config["hidden_size"], config["vocab_size"]) == (64, 320)
    assert config["medusa_fc_bias"] is True
    assert (config["draftlab"]["layout"], config["draftlab"]["base_model"]) == (
        "vllm-medusa",
        "tiny-llama",
    )


def test_no_key_can_be_taken_for_a_count(target, build, settings, tmp_path):
    export_drafter(build("medusa"), target.view, settings(), tmp_path / "out")
    config, _ = read_folder(tmp_path / "out")
    folded = [k for k in config if "num" in k and ("heads" in k or "layers" in k)]
    assert sorted(folded) == ["num_heads", "num_hidden_layers"]


def test_names_and_shapes_are_the_engines(target, build, settings, tmp_path):
    drafter = build("medusa", num_heads=3, num_draft_tokens=3, **OWN)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    _, weights = read_folder(tmp_path / "out")
    expected = {f"blocks.{i}.layers.0.weight": (64, 64) for i in range(3)}
    expected |= {f"blocks.{i}.layers.0.bias": (64,) for i in range(3)}
    expected |= {f"lm_heads.{i}.weight": (320, 64) for i in range(3)}
    assert {n: tuple(t.shape) for n, t in weights.items()} == expected


@pytest.mark.parametrize("head", [{}, OWN, LOW_RANK], ids=["tied", "own", "low_rank"])
def test_a_reduced_vocabulary_is_refused_since_vllm_cannot_load_it(
    head, target, build, settings, tmp_path
):
    drafter = build("medusa", draft_vocab_size=96, **head)
    with pytest.raises(NotExportable, match=r"draft_vocab_size=96.*draft_vocab_size=null"):
        export_drafter(drafter, target.view, settings(), tmp_path / "out")


def test_more_draft_tokens_than_heads_are_refused(target, build, settings, tmp_path):
    with pytest.raises(ConfigError, match=r"num_draft_tokens=5.*at most 4"):
        export_drafter(build("medusa"), target.view, settings(num_draft_tokens=5), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_switch_that_vllm_does_not_read_is_refused_by_name(target, build):
    own = build("medusa").serving_weights()
    serving = ServingWeights("medusa", {**own.config, "gated": True}, own.tensors)
    with pytest.raises(NotExportable, match="gated"):
        medusa_config(serving, target.view, None)
