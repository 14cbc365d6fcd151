import pytest

from draftlab.cli.hardware import (
    HardwareSettings,
    apply_hardware,
    launcher_command,
    launcher_environment,
)
from draftlab.errors import ConfigError
from draftlab.settings.base import parse_settings


def cpu(processes, threads=None):
    return HardwareSettings(kind="cpu", num_processes=processes, threads=threads)


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


def test_one_device_cannot_run_two_processes():
    with pytest.raises(ConfigError, match="single_gpu runs one process, not 2"):
        parse_settings(
            HardwareSettings, {"kind": "single_gpu", "num_processes": 2, "threads": None}
        )


def test_asking_for_devices_that_are_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    hardware = HardwareSettings(kind="ddp", num_processes=2, threads=1)
    with pytest.raises(ConfigError, match=r"needs as many CUDA devices.* sees 1"):
        apply_hardware(hardware)


def test_the_launcher_starts_the_module_in_every_process():
    words = launcher_command(cpu(2), ["draftlab.cli.worker", "outputs/My Run"])
    assert words[words.index("--num_processes") + 1] == "2"
    assert words[-3:] == ["--module", "draftlab.cli.worker", "outputs/My Run"]


def test_launched_cpu_processes_see_no_device():
    environment = launcher_environment(cpu(2, threads=3))
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["ACCELERATE_USE_CPU"] == "true"
