"""EAGLE, P-EAGLE, DFlash and DSpark folders: read back by a plain reader, and what is refused."""

import json
import shlex

import pytest
import torch
from replayed_head import read_folder
from replayed_parallel import ReplayedDFlash, ReplayedDSpark, ReplayedEagle, ReplayedPEagle

from draftlab.errors import ConfigError, NotExportable
from draftlab.export.base import export_drafter

DFLASH = {"num_layers": 2, "block_size": 5, "num_draft_tokens": 4}
DSPARK = {"num_layers": 2, "block_size": 5, "num_draft_tokens": 5, "markov_rank": 16}
PEAGLE = {"num_layers": 2, "num_depths": 4, "num_draft_tokens": 4}
CASES = {
    "eagle": ("eagle", {}),
    "eagle_two_layers": ("eagle", {"num_layers": 2}),
    "peagle": ("peagle", PEAGLE),
    "peagle_reduced": ("peagle", PEAGLE | {"draft_vocab_size": 96, "mask_token_id": 7}),
    "peagle_window": ("peagle", PEAGLE | {"sliding_window": 4}),
    "dflash": ("dflash", DFLASH),
    "dflash_causal": ("dflash", DFLASH | {"causal": True, "mask_token_id": 7}),
    "dflash_window": ("dflash", DFLASH | {"sliding_window": 6, "draft_vocab_size": 96}),
    "dspark": ("dspark", DSPARK),
    "dspark_causal": ("dspark", DSPARK | {"causal": True, "mask_token_id": 7}),
    "dspark_window": ("dspark", DSPARK | {"sliding_window": 6, "draft_vocab_size": 96}),
    "dspark_projection": ("dspark", DSPARK | {"markov_table": False, "confidence_weight": 0.0}),
}
NETWORKS = {"eagle": ReplayedEagle, "dflash": ReplayedDFlash, "dspark": ReplayedDSpark}


def rebuilt(kind, folder, target):
    if kind == "peagle":
        return ReplayedPEagle(folder, target.view.embed)
    return NETWORKS[kind](folder, target.view.embed, target.view.head_rows(None))


@pytest.mark.parametrize("name", CASES)
def test_a_plain_reader_of_the_folder_computes_the_trained_draft_logits(
    name, target, build, drafted, settings, tmp_path
):
    kind, keys = CASES[name]
    drafter = build(kind, **keys)
    seen, next_ids, tokens, log_probs, law_ids = drafted(target, drafter)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    network = rebuilt(kind, tmp_path / "out", target)
    features = seen.final if kind == "eagle" else seen.taps
    with torch.no_grad():
        logits = network.draft(features[0], next_ids, tokens)
    count = log_probs.shape[-1]
    if "d2t" in network.weights:
        ids = torch.arange(count) + network.weights["d2t"]
        assert torch.equal(law_ids[0, 0], ids)
    told = logits[:, :count].log_softmax(-1).clamp_min(-80)
    torch.testing.assert_close(told, log_probs, atol=1e-5, rtol=1e-5)


def test_an_eagle_folder_holds_no_norm_no_head_and_no_embedding(target, build, settings, tmp_path):
    export_drafter(build("eagle"), target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {name for name in weights if "self_attn" not in name and "mlp" not in name} == {
        "fc.weight",
        "layers.0.post_attention_layernorm.weight",
    }


def test_a_learned_mask_embedding_travels_as_a_spare_row_of_an_embedding_and_not_pickled(
    target, build, settings, tmp_path
):
    drafter = build("dflash", **DFLASH)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    table, mask_id = weights["embed_tokens.weight"], config["dflash_config"]["mask_token_id"]
    assert mask_id >= target.spec.num_token_ids
    assert torch.equal(table[mask_id], drafter.backbone.mask_embedding.detach())
    others = torch.arange(target.spec.vocab_size) != mask_id
    assert torch.equal(table[others], target.view.embed(others.nonzero().squeeze(1)))
    assert not list((tmp_path / "out").glob("*.pt"))


def test_a_mask_token_of_the_target_needs_no_embedding(target, build, settings, tmp_path):
    export_drafter(
        build("dflash", mask_token_id=7, **DFLASH), target.view, settings(), tmp_path / "out"
    )
    config, weights = read_folder(tmp_path / "out")
    assert config["dflash_config"]["mask_token_id"] == 7
    assert "embed_tokens.weight" not in weights


def test_taps_are_counted_from_zero_in_a_dflash_folder(target, build, settings, tmp_path):
    export_drafter(
        build("dflash", tap_layers=[1, 4], **DFLASH), target.view, settings(), tmp_path / "out"
    )
    assert read_folder(tmp_path / "out")[0]["dflash_config"]["target_layer_ids"] == [0, 3]


def test_the_command_of_a_parallel_head_says_so(target, build, settings, tmp_path):
    result = export_drafter(build("peagle", **PEAGLE), target.view, settings(), tmp_path / "out")
    asked = json.loads(shlex.split(result.serve_command)[-1])
    assert (asked["method"], asked["parallel_drafting"]) == ("eagle3", True)


@pytest.mark.parametrize(
    ("kind", "keys", "error", "named"),
    [
        ("eagle", {"fc_bias": True}, NotExportable, r"drafter\.fc_bias=false"),
        ("eagle", {"sliding_window": 8}, NotExportable, r"drafter\.sliding_window=null"),
        ("eagle", {"draft_vocab_size": 96}, NotExportable, r"drafter\.draft_vocab_size=null"),
        ("peagle", PEAGLE, ConfigError, r"num_draft_tokens=9.*at most 4"),
        ("dflash", DFLASH, ConfigError, r"num_draft_tokens=9.*at most 4"),
        ("dspark", DSPARK, ConfigError, r"num_draft_tokens=9.*at most 5"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name(
    kind, keys, error, named, target, build, settings, tmp_path
):
    depth = 9 if error is ConfigError else None
    with pytest.raises(error, match=named):
        export_drafter(
            build(kind, **keys), target.view, settings(num_draft_tokens=depth), tmp_path / "out"
        )
    assert list(tmp_path.iterdir()) == []
