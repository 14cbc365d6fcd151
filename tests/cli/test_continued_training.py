"""`init=DRAFTER`: an existing drafter goes on with new data, its vocabulary locked (case O-19)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from draftlab.cli.main import main
from draftlab.runs.run_dir import list_runs

CHAT = {
    "messages": [{"role": "user", "content": "¿Qué?"}, {"role": "assistant", "content": "zzzz"}]
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("first")
    words = ["drafter.draft_vocab_size=96", "train.max_steps=3", "hardware.threads=1"]
    assert main(["train", *words, f"paths.outputs={outputs}"]) == 0
    return list_runs(outputs)[-1]


def go_on(trained, folder, *words):
    """Train further on other text, whose most frequent tokens are others."""
    path = folder / "mine.jsonl"
    path.write_text((json.dumps(CHAT) + "\n") * 8)
    data = ["data=jsonl", f"data.paths={path}", "data.validation_fraction=0"]
    common = ["train.max_steps=1", "hardware.threads=1", f"paths.outputs={folder}"]
    assert main(["train", f"init={trained.path}", *data, *common, *words]) == 0
    return list_runs(folder)[-1]


def tensors_of(run):
    return load_file(run.pointed("latest") / "drafter.safetensors")


def test_a_step_that_learns_nothing_leaves_every_number_as_it_was(trained, tmp_path):
    run = go_on(trained, tmp_path, "optim.lr=0", "optim.adamw_lr=0")
    before = load_file(
        (trained.pointed("best") or trained.pointed("latest")) / "drafter.safetensors"
    )
    after = tensors_of(run)
    assert before.keys() == after.keys()
    assert len(before["draft_vocab_ids"]) == 96
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_new_data_moves_the_weights_and_never_the_vocabulary(trained, tmp_path):
    after = tensors_of(go_on(trained, tmp_path, "optim.lr=0.1"))
    before = load_file(
        (trained.pointed("best") or trained.pointed("latest")) / "drafter.safetensors"
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert "draft_vocab_ids" not in changed


def test_another_kind_is_refused_with_the_right_one(trained, tmp_path, capsys):
    words = [f"init={trained.path}", "drafter=eagle3", f"paths.outputs={tmp_path}"]
    assert main(["train", *words, "hardware.threads=1"]) == 2
    assert "pass drafter=medusa" in capsys.readouterr().err
