"""Cases O-22 and O-37 by the real command: two processes are one run, and fail as one."""

import socket

import psutil
import pytest
import torch
from command_line import finish, only_run, run, start, stop, wait_until
from safetensors.torch import load_file

from draftlab.runs.metrics_log import read_metrics

WORDS = (
    "train",
    "target=tiny",
    "hardware=cpu",
    "data.max_samples=14",
    "regenerate.prompts_per_shard=4",
    "train.max_steps=6",
    "train.save_every_steps=3",
    "train.batch_rows=1",
    "hardware.threads=1",
)
TWO = "hardware.num_processes=2"


def losses(finished):
    return {
        row["step"]: {
            key: value
            for key, value in row.items()
            if key.startswith(("train/loss", "train/hit", "train/overlap", "train/grad_norm"))
        }
        for row in read_metrics(finished.metrics_path)
        if row["split"] == "train"
    }


def rank(process, number):
    """Find a worker of a running command."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if "draftlab.cli.worker" in child.cmdline() and child.environ().get("RANK") == str(number):
            return child
    return None


@pytest.mark.slow
def test_two_processes_are_one_run_with_the_losses_of_double_accumulation(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    run(two, *WORDS, TWO)
    run(one, *WORDS, "train.accumulation=2")
    pair, alone = only_run(two / "outputs"), only_run(one / "outputs")
    assert pair.is_finished
    assert [path.name for path in two.rglob("config.yaml")] == ["config.yaml"]
    assert [path.name for path in two.rglob("metrics.jsonl")] == ["metrics.jsonl"]
    assert pair.read_config()["hardware"]["num_processes"] == 2
    found, expected = losses(pair), losses(alone)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, numbers in expected.items():
        assert len(numbers) > 3
        assert found[step] == pytest.approx(numbers, rel=1e-5)
    weights = [load_file(each.pointed("latest") / "drafter.safetensors") for each in (pair, alone)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_drafter_cut_over_two_processes_is_one_run_with_the_same_losses(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    words = (*WORDS, "drafter=eagle3", "optim=adamw")
    run(two, *words, TWO, "hardware.shard=drafter")
    run(one, *words, "train.accumulation=2")
    cut, whole = only_run(two / "outputs"), only_run(one / "outputs")
    assert cut.is_finished
    found, expected = losses(cut), losses(whole)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-4)
    weights = [load_file(each.pointed("latest") / "drafter.safetensors") for each in (cut, whole)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_target_and_drafter_cut_over_two_processes_are_one_run_with_the_same_losses(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    two.mkdir()
    one.mkdir()
    words = (*WORDS, "drafter=eagle3", "optim=adamw", "regenerate.capture_features=false")
    run(two, *words, TWO, "hardware.shard=both")
    run(one, *words, "train.accumulation=2", "target.kernels=reference")
    cut, whole = only_run(two / "outputs"), only_run(one / "outputs")
    assert cut.is_finished
    answers = [
        [path.read_bytes() for path in sorted(each.glob("outputs/answers/*/shard-*.jsonl"))]
        for each in (two, one)
    ]
    assert len(answers[0]) > 1
    assert answers[0] == answers[1]
    found, expected = losses(cut), losses(whole)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-4)


MACHINES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_machines: 2
num_processes: 2
machine_rank: 0
main_process_ip: 127.0.0.1
main_process_port: {port}
rdzv_backend: static
same_network: true
use_cpu: true
"""


@pytest.mark.slow
def test_two_machines_meet_in_one_run(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "machines.yaml").write_text(MACHINES.format(port=port))
    words = (*WORDS, TWO, "hardware.accelerate_config=machines.yaml")
    machines = [
        start(tmp_path, *words, DRAFTLAB_RUN_ID="job-7", DRAFTLAB_MACHINE_RANK=str(rank))
        for rank in (1, 0)
    ]
    try:
        ends = [finish(machine) for machine in machines]
    finally:
        for machine in machines:
            stop(machine)
    assert [code for code, _ in ends] == [0, 0], ends
    met = only_run(tmp_path / "outputs")
    assert met.path.name == "job-7"
    assert met.is_finished
    assert list(losses(met)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "moment"), [(1, "checkpoints/latest"), (0, "train.log")])
def test_the_death_of_one_process_ends_the_run_which_then_goes_on(tmp_path, killed, moment):
    words = (*WORDS, TWO, "train.max_steps=48", "train.save_every_steps=6")
    process = start(tmp_path, *words)
    try:
        wait_until(process, lambda: any(tmp_path.glob(f"outputs/adhoc/*/{moment}")))
        rank(process, killed).kill()
        code, said = finish(process)
    finally:
        stop(process)
    assert code == 1
    interrupted = only_run(tmp_path / "outputs")
    assert not interrupted.is_finished
    assert not interrupted.is_running
    last = said.strip().splitlines()[-1]
    assert last.startswith("draftlab train: a worker of ")
    assert f"draftlab train resume={interrupted.path.relative_to(tmp_path)}" in last
    run(tmp_path, "train", f"resume={interrupted.path}")
    assert interrupted.is_finished


@pytest.mark.slow
def test_no_process_outlives_a_killed_command_and_the_same_words_go_on(tmp_path):
    words = (*WORDS, TWO, "train.max_steps=48", "train.save_every_steps=6")
    process = start(tmp_path, *words)
    try:
        wait_until(process, lambda: any(tmp_path.glob("outputs/adhoc/*/checkpoints/latest")))
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) >= 3  # the launcher and two workers
        process.kill()
        _, alive = psutil.wait_procs(below, timeout=30)
    finally:
        stop(process)
    assert alive == []
    interrupted = only_run(tmp_path / "outputs")
    assert not interrupted.is_finished
    run(tmp_path, *words)
    assert only_run(tmp_path / "outputs") == interrupted
    assert interrupted.is_finished
