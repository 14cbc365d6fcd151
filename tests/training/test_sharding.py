"""Weights cut over processes, and checkpoints that any number of processes goes on from.

Losses are float64 sums over another order of rows and shards: equal to 1e-9 of themselves. Muon
computes in bfloat16, whose 8 bits show the order of summation: equal to 1e-4.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from toy_training import run_training
from training_worker import WORLD_ANSWERS, WORLD_FLAVOURS, world_training
from worlds import run_world

from draftlab.errors import ConfigError
from draftlab.targets.sharding import whole_tensor
from draftlab.training.sharding import cut_like, gather_weights

FLAVOURS = sorted(WORLD_FLAVOURS)


def close(name):
    return 1e-4 if "muon" in name else 1e-9


def losses(path, key="train/loss"):
    lines = json.loads(path.read_text())
    return {step: numbers[key] for step, split, numbers in lines if split == "train"}


def run_alone(folder, name, resume_from=None):
    _, _, numbers = run_training(
        folder,
        answers=WORLD_ANSWERS,
        optim=WORLD_FLAVOURS[name][1],
        train=world_training(1),
        on_checkpoint=lambda step, drafter: {"tau": 1.0 + step},
        resume_from=resume_from,
    )
    return numbers


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    run_world("begin-in-world", out, processes=2)
    return out


@pytest.fixture(scope="module")
def four(two, tmp_path_factory):
    out = tmp_path_factory.mktemp("four") / "resumed"
    shutil.copytree(two, out)
    run_world("resume-in-world", out, processes=4)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAVOURS)
def test_two_processes_train_as_one_does(two, tmp_path, name):
    numbers = run_alone(tmp_path, name)
    for key in ("train/loss", "train/grad_norm"):
        found = losses(two / f"{name}-0.json", key)
        assert found == pytest.approx(numbers.column(key), rel=close(name))
    assert json.loads((two / f"{name}-1.json").read_text()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAVOURS)
def test_a_checkpoint_of_shards_is_a_checkpoint_of_whole_tensors(two, tmp_path, name):
    run_alone(tmp_path, name)
    for file in ("drafter.safetensors", "state/tensors.safetensors"):
        expected = load_file(tmp_path / "step-000006" / file)
        found = load_file(two / name / "step-000006" / file)
        assert found.keys() == expected.keys()
        assert {k: x.shape for k, x in found.items()} == {k: x.shape for k, x in expected.items()}
        if "muon" not in name:
            for key, tensor in expected.items():
                torch.testing.assert_close(found[key], tensor, rtol=1e-7, atol=1e-9)
    assert (two / name / "best").read_text() == "step-000006"


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAVOURS)
def test_what_two_saved_one_goes_on_with(two, tmp_path, name):
    folder = tmp_path / "alone"
    shutil.copytree(two / name, folder)
    numbers = run_alone(folder, name, resume_from=folder / "step-000003")
    expected = losses(two / f"{name}-0.json")
    found = numbers.column("train/loss")
    assert list(found) == [4, 5, 6]
    assert found == pytest.approx({s: expected[s] for s in (4, 5, 6)}, rel=close(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAVOURS)
def test_what_two_saved_four_go_on_with(two, four, name):
    expected, found = losses(two / f"{name}-0.json"), losses(four / f"{name}-0.json")
    assert list(found) == [4, 5, 6]
    assert found == pytest.approx({s: expected[s] for s in (4, 5, 6)}, rel=close(name))


def test_one_process_has_nothing_to_cut(tmp_path):
    with pytest.raises(ConfigError, match="there is one"):
        run_training(tmp_path, answers=WORLD_ANSWERS, is_sharded=True)


def test_what_is_whole_stays_itself():
    weight = torch.nn.Parameter(torch.ones(3))
    assert whole_tensor(weight) is weight
    assert cut_like(weight, torch.zeros(3)) is weight
    assert gather_weights(torch.nn.Linear(2, 2), is_kept=True) == {}
