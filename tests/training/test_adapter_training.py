"""Adapters in the trainer: what moves, what is probed, saved and resumed, and in two processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from adapter_worker import ANSWERS, WORLD, adapted, train
from safetensors.torch import load_file
from toy_training import optim_settings, run_training, toy_drafter, train_settings
from worlds import run_world

from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter, read_card
from draftlab.errors import CheckpointError, ConfigError
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder, 1)
    return folder


def assert_equal_files(found, expected):
    for name in ("adapter.safetensors", "state/tensors.safetensors"):
        ours, theirs = load_file(found / name), load_file(expected / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_only_adapters_move_and_only_they_are_kept(target, tmp_path):
    drafter = adapted(target)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    result, _, _ = train(tmp_path, 1, drafter=drafter)
    moved = {n for n, p in drafter.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {name for name in before if ".lora_" in name}
    files = sorted(path.name for path in result.latest.iterdir())
    assert files == ["adapter.safetensors", "drafter.json", "state"]
    state = load_file(result.latest / "state" / "tensors.safetensors")
    assert all(".lora_" in name for name in state)
    saved = read_card(result.latest).adapter
    assert saved is not None
    assert (saved.rank, saved.alpha) == (4, 8.0)


def test_a_probe_sees_merged_running_means_and_training_never_notices(target, tmp_path, unbroken):
    drafter, seen = adapted(target), {}

    def probe(step, probed):
        assert probed.adapter is None
        seen[step] = {name: x.clone() for name, x in probed.state_dict().items()}
        return {"tau": 1.0 + step}

    result, _, _ = train(tmp_path, 1, drafter=drafter, on_checkpoint=probe)
    assert_equal_files(result.latest, unbroken / "step-000009")
    kept = load_file(result.latest / "adapter.safetensors")  # of the running means
    base = dict(drafter.named_parameters())["hidden.base_layer.weight"]
    delta = 8.0 / 4 * (kept["hidden.lora_B.weight"] @ kept["hidden.lora_A.weight"])
    assert torch.equal(seen[9]["hidden.weight"], base + delta)
    assert not torch.equal(seen[9]["hidden.weight"], seen[3]["hidden.weight"])


def test_a_killed_training_of_adapters_ends_with_the_same_bits(unbroken, tmp_path):
    worker = Path(__file__).with_name("adapter_worker.py")
    command = [sys.executable, str(worker), "die", str(tmp_path), "5"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "latest").read_text() == "step-000003"
    result, _, _ = train(tmp_path, 1, resume_from=tmp_path)
    assert_equal_files(result.latest, unbroken / "step-000009")


def test_the_start_hangs_on_the_seed_alone(target):
    first, same, other = (adapted(target, seed=seed).state_dict() for seed in (7, 7, 8))
    drafter = toy_drafter(target)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    adapted(target, drafter=drafter)
    assert torch.rand(1) == expected
    assert all(torch.equal(first[name], same[name]) for name in first)
    starts = [name for name in first if ".lora_A." in name]
    assert not any(torch.equal(first[name], other[name]) for name in starts)


def test_other_adapters_do_not_go_on_with_this_training(target, unbroken):
    for drafter in (adapted(target, rank=2), adapted(target, alpha=4.0)):
        with pytest.raises(CheckpointError, match="adapter: began with lora rank"):
            train(unbroken, 1, drafter=drafter, resume_from=unbroken)


def test_muon_is_refused_with_what_to_pass(target, tmp_path):
    with pytest.raises(ConfigError, match="pass optim=adamw"):
        run_training(
            tmp_path,
            answers=ANSWERS,
            target=target,
            drafter=adapted(target),
            optim=optim_settings(kind="muon", adamw_lr=0.003),
            train=train_settings(),
        )


def test_layers_computed_twice_give_their_adapters_the_same_bits(target, tmp_path):
    data = yaml.safe_load((conf_dir() / "drafter" / "eagle3.yaml").read_text())
    settings = parse_settings(drafter_class("eagle3").settings_class, data)
    kept = []
    for twice in (False, True):
        result, _, _ = run_training(
            tmp_path / str(twice),
            answers=ANSWERS[:4],
            target=target,
            drafter=adapted(target, drafter=build_drafter(settings, target.view)),
            train=train_settings(max_steps=2, gradient_checkpointing=twice),
        )
        kept.append(load_file(result.latest / "adapter.safetensors"))
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert kept[0]["layers.0.mlp.up_proj.lora_B.weight"].abs().max() > 0


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    run_world("in-world", out, processes=2, worker="adapter_worker.py")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLD)
def test_two_processes_are_one_with_double_accumulation(two, unbroken, tmp_path, name):
    """Float64 sums in another order: equal to 1e-9 of themselves."""
    _, _, numbers = train(tmp_path, 1)
    lines = json.loads((two / f"{name}-0.json").read_text())
    for key in ("train/loss", "train/grad_norm"):
        found = {step: row[key] for step, split, row in lines if split == "train"}
        assert found == pytest.approx(numbers.column(key), rel=1e-9)
    found = load_file(two / name / "step-000009" / "adapter.safetensors")
    expected = load_file(unbroken / "step-000009" / "adapter.safetensors")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLD)
def test_what_two_saved_one_goes_on_with(two, unbroken, tmp_path, name):
    folder = tmp_path / "alone"
    shutil.copytree(two / name, folder)
    result, _, _ = train(folder, 1, resume_from=folder / "step-000003")
    found = load_file(result.latest / "adapter.safetensors")
    for key, tensor in load_file(unbroken / "step-000009" / "adapter.safetensors").items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9)
