from contextlib import nullcontext

import pytest

from draftlab.cli.hardware import (
    HardwareSettings,
    apply_hardware,
    launcher_command,
    launcher_environment,
    place_drafters,
    require_threads,
)
from draftlab.errors import ConfigError
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target


def hardware_of(kind, processes, threads=None, **changes):
    plain = {"shard": "none", "drafter_device": None, "accelerate_config": None}
    data = {"kind": kind, "num_processes": processes, "threads": threads, **plain, **changes}
    return parse_settings(HardwareSettings, data)


def cpu(processes, threads=None, **changes):
    return hardware_of("cpu", processes, threads, **changes)


def test_threads_left_open_share_the_cores(monkeypatch):
    monkeypatch.setattr("draftlab.cli.hardware.num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu(2).resolved().threads == 4
    assert cpu(16).resolved().threads == 1
    assert cpu(2, threads=3).resolved().threads == 3


def test_threads_left_open_follow_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu(2).resolved().threads == 3
    assert cpu(2, threads=1).resolved().threads == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert cpu(10**6).resolved().threads == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_more_threads_than_a_process_has_cores_are_refused(monkeypatch, processes):
    monkeypatch.setattr("draftlab.cli.hardware.num_cores", lambda: 4)
    for threads in (None, 1, 4):
        require_threads(cpu(processes, threads=threads))
    with pytest.raises(ConfigError, match=r"threads=5 is more .* 4, .* at most hardware.threads=4"):
        require_threads(cpu(processes, threads=5))


@pytest.mark.parametrize(("devices", "is_here"), [(7, False), (8, True)])
def test_threads_for_a_machine_with_other_devices_are_not_judged_here(
    monkeypatch, devices, is_here
):
    monkeypatch.setattr("draftlab.cli.hardware.num_cores", lambda: 2)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    hardware = hardware_of("ddp", 8, threads=12)
    with pytest.raises(ConfigError, match="threads=12") if is_here else nullcontext():
        require_threads(hardware)


def test_a_run_of_a_larger_machine_is_warned_of_its_threads_and_goes_on(monkeypatch, caplog):
    monkeypatch.setattr("draftlab.cli.hardware.num_cores", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    apply_hardware(cpu(1, threads=2))
    assert not caplog.records
    apply_hardware(cpu(1, threads=3))
    assert "hardware.threads=3 is more than the cores" in caplog.text


def test_one_device_cannot_run_two_processes():
    with pytest.raises(ConfigError, match="single_gpu runs one process, not 2"):
        hardware_of("single_gpu", 2)


def test_asking_for_devices_that_are_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    hardware = hardware_of("ddp", 2)
    with pytest.raises(
        ConfigError, match=r"many CUDA devices.* sees 1; use hardware=cpu hardware.num_processes=2,"
    ):
        apply_hardware(hardware)


def test_one_process_without_a_device_is_sent_to_the_processor(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"sees 0; use hardware=cpu, or see"):
        apply_hardware(hardware_of("single_gpu", 1))


def test_the_launcher_starts_the_module_in_every_process():
    words = launcher_command(cpu(2), ["draftlab.cli.worker", "outputs/My Run"])
    assert words[words.index("--num_processes") + 1] == "2"
    assert words[-3:] == ["--module", "draftlab.cli.worker", "outputs/My Run"]


def test_launched_cpu_processes_see_no_device():
    environment = launcher_environment(cpu(2, threads=3))
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("shard", ["drafter", "target", "both"])
def test_cutting_over_one_process_is_refused(shard):
    with pytest.raises(ConfigError, match=r"hardware\.num_processes=1 is one"):
        cpu(1, shard=shard)


def test_what_is_cut_is_the_drafter_the_target_or_both():
    cut = {s: cpu(2, shard=s) for s in ("none", "drafter", "target", "both")}
    assert {s: (h.cuts_drafter, h.cuts_target) for s, h in cut.items()} == {
        "none": (False, False),
        "drafter": (True, False),
        "target": (False, True),
        "both": (True, True),
    }


def test_a_device_for_the_drafter_is_for_one_process():
    with pytest.raises(ConfigError, match="is for one process, not 2"):
        cpu(2, drafter_device="cuda:1")


def test_a_device_for_the_drafter_that_nothing_goes_to_is_refused():
    with pytest.raises(ConfigError, match="has no effect on this command"):
        apply_hardware(cpu(1, drafter_device="cuda:1"))


@pytest.mark.parametrize(
    ("device", "message"),
    [("cpu", "is where the target is"), ("cuda:7", "torch sees 0"), ("tpu?", "is no device")],
)
def test_a_device_for_the_drafter_must_be_there_and_another_one(monkeypatch, device, message):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=message):
        place_drafters(tiny_target(), cpu(1, drafter_device=device))


def test_a_drafter_without_a_device_of_its_own_is_with_the_target():
    target = tiny_target()
    place_drafters(target, cpu(1))
    assert target.drafter_view is target.view


def test_a_launcher_file_for_one_process_is_refused():
    with pytest.raises(ConfigError, match=r"no effect with hardware\.num_processes=1"):
        cpu(1, accelerate_config="machines.yaml")


def test_a_launcher_file_says_how_processes_start_and_the_environment_which_machine(monkeypatch):
    hardware = cpu(4, accelerate_config="machines.yaml")
    monkeypatch.setenv("SLURM_NODEID", "1")
    words = launcher_command(hardware, ["draftlab.cli.worker", "RUN"])
    assert words[words.index("--config_file") + 1] == "machines.yaml"
    assert words[words.index("--machine_rank") + 1] == "1"
    assert words[words.index("--num_processes") + 1] == "4"
    assert "--num_machines" not in words
    monkeypatch.setenv("DRAFTLAB_MACHINE_RANK", "0")
    words = launcher_command(hardware, ["draftlab.cli.worker", "RUN"])
    assert words[words.index("--machine_rank") + 1] == "0"
    monkeypatch.delenv("DRAFTLAB_MACHINE_RANK")
    monkeypatch.delenv("SLURM_NODEID")
    assert "--machine_rank" not in launcher_command(hardware, ["draftlab.cli.worker", "RUN"])
