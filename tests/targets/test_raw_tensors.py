import pytest
import torch
from safetensors.torch import save_file

from draftlab.targets.raw_tensors import read_raw_tensors
from draftlab.targets.tiny import build_tiny_model, tiny_target

EXTRA = {"mtp.a.weight": torch.arange(3.0), "mtp.b.weight": torch.ones(2, 2)}


@pytest.mark.parametrize("shard_size", ["50GB", "60KB"], ids=["one file", "shards"])
def test_tensors_are_read_by_the_beginning_of_their_names(tmp_path, shard_size):
    model = build_tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    found = read_raw_tensors(str(tmp_path), None, "model.layers.0.")
    assert torch.equal(
        found["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight
    )
    assert all(name.startswith("model.layers.0.") for name in found)
    assert read_raw_tensors(str(tmp_path), None, "mtp.") == {}


def test_what_no_module_holds_is_read_too(tmp_path):
    save_file(EXTRA, tmp_path / "model.safetensors")
    found = read_raw_tensors(str(tmp_path), None, "mtp.b")
    assert found.keys() == {"mtp.b.weight"}
    assert torch.equal(found["mtp.b.weight"], EXTRA["mtp.b.weight"])


def test_a_target_from_no_file_has_none():
    assert tiny_target().view.raw_tensors("model.") == {}
    assert read_raw_tensors("nobody/nothing", None, "model.") == {}
