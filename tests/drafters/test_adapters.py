"""Adapters on disk and beside odd bases: models from a folder, half precision, another drafter."""

import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

from draftlab.drafters.adapters import (
    AdapterSettings,
    BaseDrafter,
    adapt,
    check_adapter,
    merge,
    merged,
)
from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import (
    build_drafter,
    load_adapted,
    load_drafter,
    read_card,
    save_drafter,
)
from draftlab.errors import CheckpointError, ConfigError
from draftlab.export.base import export_drafter
from draftlab.export.settings import ExportSettings
from draftlab.files import compute_file_sha256
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.fingerprint import fingerprint_weights
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

LORA = AdapterSettings(kind="lora", rank=4, alpha=6.0)


@pytest.fixture(scope="module")
def target():
    return tiny_target(dtype=torch.float32)


def build(kind, target, **changes):
    data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text()) | changes
    return build_drafter(parse_settings(drafter_class(kind).settings_class, data), target.view)


def with_adapters(drafter, base, says=0.05):
    adapt(drafter, LORA, base, seed=3)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "lora_B" in name:
                parameter.fill_(says)
    return drafter


def save_pair(folder, target, kind="medusa", **changes):
    """A base and an adapter on it, in folders beside each other."""
    base = build(kind, target, **changes)
    save_drafter(base, folder / "base", extra={})
    place = BaseDrafter(folder / "base", read_card(folder / "base").sha256)
    save_drafter(with_adapters(base, place), folder / "mine", extra={})
    return folder / "mine"


@pytest.fixture
def own_model(target, tmp_path):
    """A draft model from a folder: its base is what that folder holds."""
    folder = tmp_path / "model"
    build_tiny_model("llama", torch.float32, seed=1).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    drafter = build("draft_model", target, start="pretrained", model=str(folder))
    with_adapters(drafter, BaseDrafter(None, fingerprint_weights(drafter)))
    save_drafter(drafter, tmp_path / "mine", extra={})
    return folder, drafter, tmp_path / "mine"


def test_a_model_from_a_folder_is_not_copied(target, own_model):
    folder, drafter, saved = own_model
    size = (folder / "model.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in saved.iterdir()) < size / 3
    loaded = load_drafter(saved, target.view)
    with merged(drafter):
        assert all(torch.equal(x, loaded.state_dict()[n]) for n, x in drafter.state_dict().items())


def test_another_model_in_that_folder_is_told(target, own_model):
    folder, _, saved = own_model
    build_tiny_model("llama", torch.float32, seed=2).save_pretrained(folder)
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        load_drafter(saved, target.view)


def test_an_exported_draft_model_is_base_plus_scale_b_a(target, own_model, tmp_path):
    folder, drafter, saved = own_model
    keys = yaml.safe_load((conf_dir() / "export" / "hf.yaml").read_text())
    loaded = load_drafter(saved, target.view)
    export_drafter(loaded, target.view, ExportSettings(**keys), tmp_path / "out")
    below, served = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "out"))
    kept = load_file(saved / "adapter.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = kept[f"model.{name}.lora_A.weight"], kept[f"model.{name}.lora_B.weight"]
    assert torch.equal(served[f"{name}.weight"], below[f"{name}.weight"] + 6.0 / 4 * (b @ a))
    assert torch.equal(served["lm_head.weight"], below["lm_head.weight"])
    assert below.keys() == served.keys()
    assert drafter.adapter is not None


def test_a_base_in_half_precision_is_widened_so_that_corrections_are_not_lost(target):
    drafter = build("eagle3", target).bfloat16()
    plain = drafter.fc.weight.detach().clone()
    with_adapters(drafter, BaseDrafter(None, ""), says=1e-4)
    merge(drafter)
    assert drafter.fc.weight.dtype == torch.float32
    assert not torch.equal(drafter.fc.weight, plain.float())
    assert (drafter.fc.weight - plain.float()).abs().max() < 1e-3


def test_merged_for_good_it_trains_what_it_trained_before(target):
    drafter = build("draft_model", target, trainable="layers")
    before = {name for name, p in drafter.named_parameters() if p.requires_grad}
    with_adapters(drafter, BaseDrafter(None, ""))
    assert drafter.adapter is not None
    assert all(".layers." in name for name in drafter.adapter.layers)
    merge(drafter)
    assert {name for name, p in drafter.named_parameters() if p.requires_grad} == before


def test_what_is_counted_while_probing_belongs_to_the_adapter(target, tmp_path):
    saved = save_pair(tmp_path, target)
    drafter = load_adapted(saved, target.view)
    drafter.rank_hits[0, 0] = 5
    save_drafter(drafter, tmp_path / "counted", extra={})
    assert load_drafter(tmp_path / "counted", target.view).rank_hits[0, 0] == 5
    assert load_drafter(tmp_path / "base", target.view).rank_hits[0, 0] == 0


def test_base_and_adapter_may_move_together(target, tmp_path):
    save_pair(tmp_path / "old", target)
    shutil.move(tmp_path / "old", tmp_path / "new")
    moved = load_adapted(tmp_path / "new" / "mine", target.view)
    assert moved.adapter is not None
    assert moved.adapter.base.folder == (tmp_path / "new" / "base").resolve()


def test_an_adapter_without_its_tensors_or_of_another_moment_is_refused(target, tmp_path):
    saved = save_pair(tmp_path, target)
    kept = (saved / "adapter.safetensors").read_bytes()
    (saved / "adapter.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter\.safetensors missing"):
        load_drafter(saved, target.view)
    (saved / "adapter.safetensors").write_bytes(kept + b" ")
    with pytest.raises(CheckpointError, match="half-written or damaged"):
        load_drafter(saved, target.view)


def test_an_adapter_of_other_sizes_is_refused(target, tmp_path):
    saved = save_pair(tmp_path, target)
    file = saved / "adapter.safetensors"
    tensors = load_file(file)
    name = "blocks.0.layers.0.lora_B.weight"
    for wrong, message in (
        ({name: tensors[name][:-1].clone()}, f"{name} has shape"),
        ({"more": torch.zeros(1)}, "it has more"),
        ({"lost.lora_A.weight": torch.zeros(1, 1)}, "it has lost"),
    ):
        save_file(tensors | wrong, file)
        card = (saved / "drafter.json").read_text()
        now = card.replace(read_card(saved).sha256, compute_file_sha256(file))
        (saved / "drafter.json").write_text(now)
        with pytest.raises(CheckpointError, match=f"does not fit its base drafter: {message}"):
            load_drafter(saved, target.view)


def test_a_whole_drafter_is_no_adapter(target, tmp_path):
    save_pair(tmp_path, target)
    with pytest.raises(CheckpointError, match="holds a whole drafter; expected an adapter"):
        load_adapted(tmp_path / "base", target.view)


@pytest.mark.parametrize(
    "keys", [{"kind": "lora", "rank": 4, "alpha": None}, {"kind": "none", "rank": 4, "alpha": 8}]
)
def test_settings_that_cannot_take_effect_are_refused(keys):
    with pytest.raises(ConfigError, match="expected both with adapter=lora"):
        parse_settings(AdapterSettings, keys)


def test_a_rank_above_every_matrix_is_refused_and_the_largest_one_is_named(target):
    drafter = build("eagle3", target)
    layers = [m for n, m in drafter.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    most = max(min(layer.weight.shape) for layer in layers)
    check_adapter(drafter, most)
    with pytest.raises(ConfigError, match=f"rank={most + 1} .* at most adapter.rank={most}, the"):
        check_adapter(drafter, most + 1)
    with pytest.raises(ConfigError, match="rank=100000 is above the smaller side"):
        adapt(drafter, LORA.model_copy(update={"rank": 100_000}), BaseDrafter(None, ""), seed=3)
    assert drafter.adapter is None
