"""`draftlab bench families` by the real command: killed in a training, it goes on there."""

import json

import pytest
from command_line import kill_when, only_run, run, start

WORDS = (
    "bench",
    "families",
    "families=[medusa,eagle]",
    "target=tiny",
    "data.max_samples=12",
    "regenerate.max_new_tokens=24",
    "train.max_steps=12",
    "train.save_every_steps=3",
    "train.row_tokens=128",
    "train.precision=no",
    "eval.prompts_per_domain=1",
    "eval.max_new_tokens=6",
    "eval.speed_prompts_per_domain=0",
    "eval.draft_lengths=[]",
    "hardware.threads=1",
)


def weights_of(outputs):
    found = only_run(outputs / "bench-families")
    assert found.is_finished
    folders = sorted((found.path / "families").iterdir())
    return {
        folder.name.partition("-")[0]: (
            folder / "checkpoints" / "step-000012" / "drafter.safetensors"
        ).read_bytes()
        for folder in folders
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_bench_goes_on_in_the_middle_of_a_training(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    pattern = "outputs/bench-families/*/families/eagle-*/checkpoints/latest"
    kill_when(start(killed, *WORDS), lambda: any(killed.glob(pattern)))
    stopped = only_run(killed / "outputs" / "bench-families")
    stages = json.loads((stopped.path / "stages.json").read_text())
    assert len(stages) == 2  # answers, medusa
    said = run(killed, *WORDS)
    assert "family 1 of 1: eagle" in said
    assert "resumed from" in said
    run(whole, *WORDS)
    assert weights_of(killed / "outputs") == weights_of(whole / "outputs")
