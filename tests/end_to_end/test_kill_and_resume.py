"""Case O-20 by the real command: kill -9, the same words again, the same bits at the end."""

import logging

import pytest
import torch
from command_line import kill_when, only_run, run, start
from safetensors.torch import load_file

from draftlab.cli.main import main
from draftlab.runs.metrics_log import read_metrics

WORDS = (
    "train",
    "target=tiny",
    "data.max_samples=14",
    "regenerate.prompts_per_shard=2",
    "regenerate.batch_size=2",
    "regenerate.max_new_tokens=64",
    "train.max_steps=9",
    "train.save_every_steps=3",
    "hardware.threads=1",
)
OF_THE_MACHINE = (
    "time_s",
    "train/tokens_per_s",
    "accept/tokens_per_s",
    "train/sequences_per_s",
    "time/step_s",
    "memory/peak_bytes",
)


def outcome(folder):
    """All of a run that may not depend on whether it was killed."""
    finished = only_run(folder / "outputs")
    assert finished.is_finished
    checkpoints = {
        name: (finished.pointed(name) / "drafter.safetensors").read_bytes()
        for name in ("latest", "best")
    }
    answers = {
        path.name: path.read_bytes() for path in (folder / "outputs" / "answers").glob("*/*")
    }
    numbers = [
        {key: value for key, value in row.items() if key not in OF_THE_MACHINE}
        for row in read_metrics(finished.metrics_path)
    ]
    return checkpoints, answers, numbers


def first_shard_is_there(folder):
    return lambda: any((folder / "outputs" / "answers").glob("*/shard-00000.jsonl"))


def a_checkpoint_is_there(folder):
    return lambda: any(folder.glob("outputs/adhoc/*/checkpoints/latest"))


@pytest.fixture
def run_here(monkeypatch):
    """The same command in this process, which saves its imports."""
    # both are set by the command for its own process
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(logging.getLogger("draftlab"), "level", logging.WARNING)
    threads = torch.get_num_threads()

    def command(folder, *words):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        assert main(list(words)) == 0

    yield command
    torch.set_num_threads(threads)


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path, run_here):
    words = (*WORDS, "train.max_steps=6")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    kill_when(start(killed, *words), a_checkpoint_is_there(killed))
    interrupted = only_run(killed / "outputs")
    assert not interrupted.is_finished
    run_here(killed, *words)
    assert only_run(killed / "outputs") == interrupted
    assert "resumed from" in interrupted.log_path.read_text()
    run_here(whole, *words)
    assert outcome(killed) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_run_killed_while_answering_and_while_training_ends_with_the_same_bits(
    tmp_path, precision
):
    words = (*WORDS, "drafter=eagle3", f"train.precision={precision}")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    kill_when(start(killed, *words), first_shard_is_there(killed))
    assert 1 <= len(list(killed.glob("outputs/answers/*/shard-*.jsonl"))) < 7
    assert not list(killed.glob("outputs/adhoc/*/checkpoints"))
    interrupted = only_run(killed / "outputs")
    kill_when(start(killed, *words), a_checkpoint_is_there(killed))
    run(killed, *words)
    assert only_run(killed / "outputs") == interrupted
    run(whole, *words)
    assert outcome(killed) == outcome(whole)


@pytest.mark.slow
def test_answers_killed_half_way_are_found_by_the_training(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    answering = ("regenerate", *WORDS[1:])
    kill_when(start(killed, *answering), first_shard_is_there(killed))
    run(killed, *answering)
    run(killed, *WORDS)
    run(whole, *WORDS)
    assert "answers are there already" in only_run(killed / "outputs").log_path.read_text()
    assert outcome(killed) == outcome(whole)
    weights = load_file(only_run(whole / "outputs").pointed("latest") / "drafter.safetensors")
    assert weights
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
