"""Cases O-21, O-22, O-23 with two processes on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_training import run_training, toy_drafter, train_settings
from training_worker import EVEN_ANSWERS, UNEVEN_ANSWERS
from worlds import run_world

from draftlab.targets.tiny import tiny_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("pair")
    run_world("rank", out, processes=2)
    return out


def lines(path: Path, key: str) -> dict[int, float]:
    return {step: numbers[key] for step, _, numbers in json.loads(path.read_text())}


@pytest.mark.parametrize("name", ["even", "uneven", "uneven-tokens"])
def test_both_processes_end_with_equal_weights(pair, name):
    first, second = (load_file(pair / f"{name}-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "answers", "batch_rows", "accumulation"),
    [
        ("even", EVEN_ANSWERS, 2, 2),
        ("uneven", UNEVEN_ANSWERS, 1, 4),
        ("uneven-tokens", UNEVEN_ANSWERS, 1, 4),
    ],
)
def test_two_processes_are_one_with_double_accumulation(
    pair, tmp_path, name, answers, batch_rows, accumulation
):
    train = train_settings(batch_rows=batch_rows, accumulation=accumulation)
    target = tiny_target()
    drafter = toy_drafter(target, averages_tokens=name.endswith("tokens"))
    _, _, numbers = run_training(
        tmp_path / "one", answers=answers, target=target, drafter=drafter, train=train
    )
    found = load_file(pair / f"{name}-0.safetensors")
    for key, value in drafter.state_dict().items():
        assert torch.allclose(found[key], value, rtol=1e-9, atol=1e-12)
    path = pair / f"{name}-0.json"
    for key in ("train/loss", "train/loss_1", "train/hit_2", "train/grad_norm", "train/lr"):
        assert lines(path, key) == pytest.approx(numbers.column(key), rel=1e-6)
    assert lines(path, "train/lr") == numbers.column("train/lr")


def test_only_the_first_process_logs_and_writes(pair):
    assert json.loads((pair / "even-1.json").read_text()) == []
    assert [path.name for path in (pair / "even").glob("step-*")] == ["step-000004"]
