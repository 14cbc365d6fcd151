"""`draftlab bench gpu` on a processor: every part runs, checks pass, nothing heavy is imported."""

import json
import subprocess
import sys
import time

import pytest

from draftlab.cli.bench_gpu import _Run, main, render
from draftlab.errors import ConfigError

PARTS = (
    "conditions",
    "copy bandwidth",
    "sampler",
    "target",
    "pass times",
    "plain decoding",
    "fixed shape",
    "training",
    "graphs equal eager",
    "speculation",
)


def test_the_smoke_run_does_every_part_without_data_trackers_or_hydra(tmp_path):
    # a process of its own: other tests have imported all of these
    code = (
        "import sys; from draftlab.cli.bench_gpu import main; "
        f"rc = main(['--cpu-smoke', 'out={tmp_path}']); "
        "heavy = {'datasets', 'wandb', 'hydra', 'omegaconf'} & set(sys.modules); "
        "print('heavy', sorted(heavy)); sys.exit(rc)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heavy []" in done.stdout
    found = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert tuple(found) == PARTS
    assert not any("error" in part or "skipped" in part for part in found.values())
    sampler = found["sampler"]
    assert sampler["passed"]
    assert sampler["draw, control"] > sampler["limit"] < sampler["speculation, control"]
    assert found["graphs equal eager"]["passed"]
    assert found["speculation"]["batch 2"]["num_identical"] == 2
    text = (tmp_path / "bench_gpu.md").read_text()
    assert "no figure below says anything about a GPU" in text
    assert "| speculation | batch 1, tau |" in text


def test_without_a_gpu_the_full_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        main([f"out={tmp_path}"])


@pytest.mark.parametrize("word", ["minutes=0", "minutes=x", "place=here"])
def test_options_that_cannot_work_are_refused(word):
    with pytest.raises(ConfigError):
        main(["--cpu-smoke", word])


def test_parts_that_break_or_come_too_late_are_told_and_the_rest_goes_on():
    run = _Run(ends_at=time.monotonic() + 60)
    assert run.part("broken", lambda: 1 / 0) is None
    assert run.part("failed", lambda: {"passed": False}) == {"passed": False}
    run.ends_at = 0.0
    assert run.part("late", lambda: {"figure": 1}) is None
    assert run.found["broken"] == {"error": "ZeroDivisionError: division by zero"}
    assert run.found["late"] == {"skipped": "no time was left"}
    assert run.num_failed == 2


def test_the_table_keeps_to_its_columns():
    text = render({"part": {"a": {"b": 0.123456}, "c|d": [1.0, 2.0]}})
    assert "| part | a, b | 0.1235 |" in text
    assert "| part | c\\|d | 1, 2 |" in text
