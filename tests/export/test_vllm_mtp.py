"""Modules of multi-token prediction in MiMo's layout: read back by a plain reader, and what is refused."""

import json
import shlex

import pytest
import torch
from replayed_head import read_folder
from replayed_mtp import LAYER, ReplayedMTP

from draftlab.errors import NotExportable
from draftlab.export.base import export_drafter
from draftlab.targets.tiny import tiny_target


@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_a_plain_reader_of_the_folder_computes_the_trained_draft_logits(
    hidden_first, attention_bias, target, build, drafted, settings, tmp_path
):
    drafter = build("mtp", hidden_first=hidden_first, attention_bias=attention_bias)
    seen, next_ids, tokens, log_probs, _ = drafted(target, drafter)
    export_drafter(drafter, target.view, settings(), tmp_path / "out")
    with torch.no_grad():
        logits = ReplayedMTP(tmp_path / "out").draft(seen.final[0], next_ids, tokens)
    told = logits[:, : log_probs.shape[-1]].log_softmax(-1).clamp_min(-80)
    torch.testing.assert_close(told, log_probs, atol=1e-5, rtol=1e-5)


def test_the_command_adds_the_key_that_the_targets_config_lacks(target, build, settings, tmp_path):
    result = export_drafter(build("mtp"), target.view, settings(), tmp_path / "out")
    words = shlex.split(result.serve_command)
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"num_nextn_predict_layers": 1}
    asked = json.loads(words[words.index("--speculative-config") + 1])
    assert asked["method"] == "mtp"
    assert words[-1] in (tmp_path / "out" / "README.md").read_text()


def test_the_folder_names_mimos_class_and_holds_the_targets_embedding_and_head(
    target, build, settings, tmp_path
):
    export_drafter(build("mtp"), target.view, settings(), tmp_path / "out")
    config, weights = read_folder(tmp_path / "out")
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1
    every = torch.arange(target.spec.vocab_size)
    assert torch.equal(weights["model.embed_tokens.weight"], target.view.embed(every))
    assert torch.equal(weights["lm_head.weight"], target.view.head_rows(None))
    assert not weights[f"{LAYER}.self_attn.q_proj.bias"].any()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"draft_vocab_size": 96}, r"drafter\.draft_vocab_size=null"),
        ({"intermediate_size": 48}, r"drafter\.intermediate_size=null"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name(keys, named, target, build, settings, tmp_path):
    with pytest.raises(NotExportable, match=named):
        export_drafter(build("mtp", **keys), target.view, settings(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_heads_of_another_width_are_refused(build, settings, tmp_path):
    other = tiny_target(dtype=torch.float32, head_dim=32)
    with pytest.raises(NotExportable, match="head_dim=32; it takes"):
        export_drafter(build("mtp", on=other), other.view, settings(), tmp_path / "out")
