"""Case O-20: a killed training goes on as if nothing had happened, bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_training import run_training
from training_worker import RESUME_ANSWERS, RESUME_OPTIM, RESUME_TRAIN

from draftlab.runs.metrics_log import MetricsLog, read_metrics

CLOCKS = ("train/tokens_per_s", "train/sequences_per_s", "time/step_s", "memory/peak_bytes")


def train(run: Path, resume_from: Path | None = None):
    log = MetricsLog(run / "metrics.jsonl")
    result, _, _ = run_training(
        run / "checkpoints",
        answers=RESUME_ANSWERS,
        optim=RESUME_OPTIM,
        train=RESUME_TRAIN,
        metrics=log.log,
        resume_from=resume_from,
    )
    log.close()
    return result


def learning_numbers(run: Path):
    return {
        row["step"]: {k: v for k, v in row.items() if k not in (*CLOCKS, "time_s")}
        for row in read_metrics(run / "metrics.jsonl")
    }


def kill_worker(*arguments: str) -> None:
    worker = Path(__file__).with_name("training_worker.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(worker), *arguments], env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("unbroken")
    train(run)
    return run


@pytest.mark.parametrize(
    ("mode", "step", "latest"),
    [("die-after-step", "7", "step-000006"), ("die-in-checkpoint", "9", "step-000006")],
)
def test_a_killed_training_ends_with_the_same_bits(unbroken, tmp_path, mode, step, latest):
    kill_worker(mode, str(tmp_path), step)
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").read_text() == latest

    result = train(tmp_path, resume_from=folder)

    assert result.latest.name == "step-000012"
    for name in ("drafter.safetensors", "state/tensors.safetensors"):
        expected = load_file(unbroken / "checkpoints" / "step-000012" / name)
        found = load_file(result.latest / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert learning_numbers(tmp_path) == learning_numbers(unbroken)
    assert not list(folder.glob(".*-step-*"))


def test_a_finished_training_has_nothing_left_to_do(unbroken):
    before = (unbroken / "metrics.jsonl").read_text()
    result = train(unbroken, resume_from=unbroken / "checkpoints")
    assert result.total_steps == 12
    assert (unbroken / "metrics.jsonl").read_text() == before
