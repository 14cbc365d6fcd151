"""A target's outline: sizes counted on modules without weights equal those of the real thing."""

import json

import huggingface_hub
import pytest
import torch

from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.settings.base import parse_settings
from draftlab.settings.compose import compose
from draftlab.targets.outline import find_outline
from draftlab.targets.published import published_model, published_models
from draftlab.targets.settings import TargetSettings
from draftlab.targets.tiny import TINY_FAMILIES, tiny_target

PLAIN = [name for name, card in published_models().items() if card.stored != "mxfp4"]


def settings(**changes):
    data = compose("train", ["target=tiny"]).data["target"]
    return parse_settings(TargetSettings, data | changes)


def hub(name, **changes):
    return settings(source="hub", name=name, **changes)


@pytest.fixture
def folder(tmp_path):
    def write(**entries):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        return settings(source="local", name=str(tmp_path))

    return write


@pytest.mark.parametrize("name", PLAIN)
def test_published_sizes_are_those_of_the_modules(name):
    outline = find_outline(hub(name), asks_hub=False)
    card = published_model(name)
    assert outline.num_parameters == card.num_parameters
    assert outline.card == card
    assert outline.refusal is None
    assert outline.origin == "published ones"


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_an_outline_counts_what_loading_finds(family):
    target = tiny_target(family, dtype=torch.float32)
    outline = find_outline(settings(family=family), asks_hub=False)
    assert outline.num_parameters == sum(p.numel() for p in target.model.parameters())
    assert (outline.hidden_size, outline.vocab_size) == (
        target.spec.hidden_size,
        target.spec.vocab_size,
    )
    kv = target.open_kv(1, 1)
    assert outline.kv_width == kv.data.numel()
    assert outline.refusal == target.speculation_refusal


def test_a_token_passes_its_own_experts_only():
    outline = find_outline(settings(family="qwen3_moe"), asks_hub=False)
    assert outline.experts == (2, 4)
    experts = 4 * 4 * 3 * 64 * 128  # layers, experts, matrices, sides
    assert outline.num_experts_weights == experts
    assert outline.num_decoder - outline.num_active == experts // 2


def test_a_vision_tower_is_in_memory_and_out_of_the_way():
    outline = find_outline(hub("google/gemma-3-12b-it"), asks_hub=False)
    layer = 2 * 3840 * 4096 + 2 * 3840 * 2048 + 3 * 3840 * 15360 + 4 * 3840 + 2 * 256
    assert outline.num_decoder == 48 * layer + 3840 + 262208 * 3840
    assert outline.num_parameters - outline.num_decoder > 400e6


def test_an_encoder_is_told_and_its_untied_head_counted():
    outline = find_outline(hub("google/flan-t5-small"), asks_hub=False)
    assert outline.has_encoder
    assert outline.num_parameters == 76_961_152
    assert outline.kv_width == 2 * 6 * 64 * 8


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "its rope type is 'dynamic'"),
        ({"model_type": "qwen3_next"}, "layers of type linear_attention"),
        ({"model_type": "mamba"}, "takes no position_ids"),
    ],
)
def test_what_cannot_be_decoded_speculatively_is_told_by_its_config(folder, entries, reason):
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4}
    sizes |= {"vocab_size": 320, "intermediate_size": 128, "num_attention_heads": 4}
    outline = find_outline(folder(**sizes | entries), asks_hub=False)
    assert reason in outline.refusal


def test_quantised_weights_are_refused_as_at_loading(folder):
    entries = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(UnsupportedTarget, match=r"is quantised \(gptq\)"):
        find_outline(folder(**entries), asks_hub=False)
    with pytest.raises(UnsupportedTarget, match=r"is quantised \(mxfp4\)"):
        find_outline(hub("openai/gpt-oss-20b"), asks_hub=False)


def test_what_only_loading_can_tell_is_none(folder):
    assert find_outline(folder(model_type="of_its_own"), asks_hub=False) is None
    assert find_outline(folder(hidden_size=3), asks_hub=False) is None
    assert find_outline(hub("owner/unheard-of"), asks_hub=False) is None
    assert find_outline(settings(source="gguf", name="x.gguf"), asks_hub=False) is None
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        find_outline(settings(source="local", name="/nowhere"), asks_hub=False)


def test_the_hubs_own_config_beats_what_is_published(tmp_path, monkeypatch):
    config = published_model("Qwen/Qwen3-8B").config | {"num_hidden_layers": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: str(path))
    outline = find_outline(hub("Qwen/Qwen3-8B"), asks_hub=True)
    assert outline.num_layers == 2
    assert outline.origin == "its config.json on the hub"


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch):
    asked = []

    def fail(url, **options):
        asked.append(url)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    outline = find_outline(hub("Qwen/Qwen3-8B"), asks_hub=True)
    assert len(asked) == 1
    assert outline.origin == "published ones; the hub gave no config.json"


def test_a_model_that_the_hub_does_not_have_is_an_error(monkeypatch):
    import httpx
    from huggingface_hub.errors import RepositoryNotFoundError

    def fail(url, **options):
        response = httpx.Response(404, request=httpx.Request("HEAD", url))
        raise RepositoryNotFoundError("404", response=response)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", fail)
    with pytest.raises(ConfigError, match="the hub has no model 'owner/typo'"):
        find_outline(hub("owner/typo"), asks_hub=True)
    assert find_outline(hub("Qwen/Qwen3-8B"), asks_hub=True) is not None
