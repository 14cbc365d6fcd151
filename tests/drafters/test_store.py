import json
import logging
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

from draftlab.drafters.eagle3 import Eagle3Settings
from draftlab.drafters.store import build_drafter, load_drafter, read_card, save_drafter
from draftlab.errors import CheckpointError, ConfigError, TargetMismatch
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

YAML = Path(__file__).parents[2] / "conf" / "drafter" / "eagle3.yaml"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def counts(seed=0):
    return torch.randint(0, 50, (320,), generator=torch.Generator().manual_seed(seed))


def build(target, token_counts=None, **changes):
    settings = parse_settings(Eagle3Settings, {**yaml.safe_load(YAML.read_text()), **changes})
    return build_drafter(settings, target.view, token_counts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_loaded_equals_what_was_saved_bit_for_bit(target, tmp_path, dtype):
    drafter = build(target, counts(), draft_vocab_size=96, train_head=True).to(dtype)
    save_drafter(drafter, tmp_path / "run", extra={"step": 3})
    loaded = load_drafter(tmp_path / "run", target.view)
    assert loaded.settings == drafter.settings
    assert loaded.vocab.ids.equal(drafter.vocab.ids)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert loaded.state_dict()[name].dtype == dtype
        assert loaded.state_dict()[name].equal(tensor), name
    assert read_card(tmp_path / "run").extra == {"step": 3}


def test_a_loaded_drafter_can_go_on_training(target, tmp_path):
    save_drafter(build(target), tmp_path, extra={})
    loaded = load_drafter(tmp_path, target.view)
    assert all(p.requires_grad for p in loaded.parameters())
    loaded.fc.weight.sum().backward()
    assert loaded.fc.weight.grad is not None


def test_the_vocabulary_comes_from_the_file_not_from_new_data(target, tmp_path):
    """Case O-19."""
    drafter = build(target, counts(1), draft_vocab_size=96)
    assert not drafter.vocab.ids.equal(build(target, counts(2), draft_vocab_size=96).vocab.ids)
    save_drafter(drafter, tmp_path, extra={})
    assert load_drafter(tmp_path, target.view).vocab.ids.equal(drafter.vocab.ids)


def test_nothing_of_the_target_is_saved(target, tmp_path):
    drafter = build(target, counts(), draft_vocab_size=96)
    save_drafter(drafter, tmp_path, extra={})
    with safe_open(tmp_path / "drafter.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == {name for name, _ in drafter.named_parameters()} | {"draft_vocab_ids"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter.json", "drafter.safetensors"]


def test_tied_tensors_are_stored_once_and_stay_tied(target, tmp_path):
    drafter = build(target, num_layers=2)
    drafter.layers[1].mlp = drafter.layers[0].mlp
    save_drafter(drafter, tmp_path, extra={})
    assert (
        read_card(tmp_path).aliases["layers.1.mlp.up_proj.weight"] == "layers.0.mlp.up_proj.weight"
    )
    loaded = load_drafter(tmp_path, target.view)
    assert loaded.layers[1].mlp.up_proj.weight.equal(drafter.layers[0].mlp.up_proj.weight)


def test_a_reduced_vocabulary_without_counts_is_refused(target):
    with pytest.raises(ConfigError, match="draft_vocab_size=96: expected training data"):
        build(target, draft_vocab_size=96)


def test_the_global_generator_is_left_alone(target):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build(target)
    assert torch.rand(1) == expected


@pytest.mark.parametrize("name", ["drafter.json", "drafter.safetensors"])
def test_a_missing_file_is_named(target, tmp_path, name):
    save_drafter(build(target), tmp_path, extra={})
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"no complete drafter: {name} missing"):
        load_drafter(tmp_path, target.view)


def test_files_of_two_moments_are_told_apart(target, tmp_path):
    save_drafter(build(target), tmp_path / "old", extra={})
    save_drafter(build(target, num_layers=2), tmp_path / "new", extra={})
    (tmp_path / "new" / "drafter.json").write_text((tmp_path / "old" / "drafter.json").read_text())
    with pytest.raises(CheckpointError, match="half-written or damaged"):
        load_drafter(tmp_path / "new", target.view)


@pytest.mark.parametrize("text", ["", "[1]", '{"kind": "eagle3"}'])
def test_a_damaged_card_is_refused(target, tmp_path, text):
    save_drafter(build(target), tmp_path, extra={})
    (tmp_path / "drafter.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged"):
        load_drafter(tmp_path, target.view)


def test_a_drafter_saved_before_some_keys_existed_is_what_it_was(target, tmp_path):
    drafter = build(target, counts(), draft_vocab_size=96)
    save_drafter(drafter, tmp_path, extra={})
    card = json.loads((tmp_path / "drafter.json").read_text())
    later = ("position_weights", "normalise", "sliding_window")
    (tmp_path / "drafter.json").write_text(
        json.dumps(
            card | {"settings": {k: v for k, v in card["settings"].items() if k not in later}}
        )
    )
    assert load_drafter(tmp_path, target.view).settings == drafter.settings


def test_settings_that_contradict_the_tensors_are_refused(target, tmp_path):
    save_drafter(build(target), tmp_path, extra={})
    card = json.loads((tmp_path / "drafter.json").read_text())
    card["settings"]["num_layers"] = 2
    (tmp_path / "drafter.json").write_text(json.dumps(card))
    with pytest.raises(CheckpointError, match="does not fit its own settings"):
        load_drafter(tmp_path, target.view)


def test_another_tokenizer_or_shape_is_refused_and_other_weights_are_a_warning(
    target, tmp_path, caplog
):
    save_drafter(build(target), tmp_path, extra={})
    with pytest.raises(TargetMismatch, match="num_layers"):
        load_drafter(tmp_path, tiny_target(num_hidden_layers=2).view)
    with caplog.at_level(logging.WARNING):
        load_drafter(tmp_path, tiny_target(seed=1).view)
    assert "other weights" in caplog.text
