"""On what a run runs, and the launcher's words derived from that alone."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml
from pydantic import PositiveInt, model_validator

from draftlab.errors import ConfigError
from draftlab.runs.provenance import num_cores
from draftlab.settings.base import Settings

if TYPE_CHECKING:
    from draftlab.targets.target import Target

MACHINE_RANK = "DRAFTLAB_MACHINE_RANK"

log = logging.getLogger(__name__)


class HardwareSettings(Settings):
    """Keys of conf/hardware/*.yaml.

    Attributes:
        kind: processor, one CUDA device, or one CUDA device a process.
        num_processes: processes that train together, on all machines.
        threads: threads of each process, no more than its cores; None takes OMP_NUM_THREADS where
            that is set, else shares the cores among the processes.
        shard: what is cut over the processes (FSDP2) instead of being whole in each: the drafter's
            weights, gradients and moments, the frozen target's layers, both, or none.
        drafter_device: where the drafter is, when not with the target: cpu or cuda:N; None: with
            it.
        accelerate_config: a file that `accelerate config` wrote, which then says how processes
            start, on several machines for one; None starts them on this machine.
    """

    kind: Literal["cpu", "single_gpu", "ddp"]
    num_processes: PositiveInt
    threads: PositiveInt | None
    shard: Literal["none", "drafter", "target", "both"]
    drafter_device: str | None
    accelerate_config: Path | None

    @model_validator(mode="after")
    def _fits(self) -> "HardwareSettings":
        if self.shard != "none" and self.num_processes == 1:
            raise ValueError(
                f"hardware.shard={self.shard} cuts over processes, and hardware.num_processes=1 is "
                "one; pass hardware.shard=none, or hardware=fsdp hardware.num_processes=N"
            )
        if self.accelerate_config is not None and self.num_processes == 1:
            raise ValueError(
                f"hardware.accelerate_config={self.accelerate_config} has no effect with "
                "hardware.num_processes=1; pass the number of processes on all machines"
            )
        if self.drafter_device is not None and self.num_processes != 1:
            raise ValueError(
                f"hardware.drafter_device={self.drafter_device} is for one process, not "
                f"{self.num_processes}, which have a device each; pass hardware.drafter_device=null"
            )
        if self.kind == "single_gpu" and self.num_processes != 1:
            raise ValueError(
                f"hardware=single_gpu runs one process, not {self.num_processes}; "
                "use hardware=ddp for one process a device"
            )
        return self

    @property
    def cuts_drafter(self) -> bool:
        """True when each process holds its share of the drafter only."""
        return self.shard in ("drafter", "both")

    @property
    def cuts_target(self) -> bool:
        """True when each process holds its share of the target's layers only."""
        return self.shard in ("target", "both")

    def resolved(self) -> "HardwareSettings":
        """Decide what was left open, once, so that a resumed run computes the same."""
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        shared = max(1, num_cores() // self.num_processes)
        threads = self.threads or (int(wanted) if wanted.isdecimal() and int(wanted) else shared)
        return self.model_copy(update={"threads": threads})


def require_threads(hardware: HardwareSettings) -> None:
    """Refuse more threads for a process than cores it may use: they wait for each other.

    Several processes may ask for more than all cores together; they need not be busy at once. Whose
    devices are not here, or which has several machines, may run where there are more cores.

    Raises:
        ConfigError: with the threads asked for, the cores there are, and what to pass.
    """
    if hardware.accelerate_config is None and not _lacks_devices(hardware):
        problem = _explain_threads(hardware)
        if problem is not None:
            raise ConfigError(problem)


def _explain_threads(hardware: HardwareSettings) -> str | None:
    cores = num_cores()
    if hardware.threads is None or hardware.threads <= cores:
        return None
    return (
        f"hardware.threads={hardware.threads} is more than the cores this process may use, "
        f"{cores}, so threads would wait for each other and steps take many times as long; pass at "
        f"most hardware.threads={cores}, or hardware.threads=null for an equal share of the cores"
    )


def _lacks_devices(hardware: HardwareSettings) -> bool:
    if hardware.kind == "cpu":
        return False
    import torch

    return torch.cuda.device_count() < _num_local(hardware)


def apply_hardware(hardware: HardwareSettings, *, places_drafters: bool = False) -> None:
    """Set this process's threads, and hide or demand CUDA; call it before anything runs.

    Args:
        hardware: the settings.
        places_drafters: the caller goes on with `place_drafters`.

    Raises:
        ConfigError: a device is asked for and there is none, or nothing goes there.
    """
    import torch

    if hardware.drafter_device is not None and not places_drafters:
        raise ConfigError(
            f"hardware.drafter_device={hardware.drafter_device} has no effect on this command; "
            "pass hardware.drafter_device=null"
        )
    if hardware.kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA starts lazily: nothing has looked yet
    elif _lacks_devices(hardware):
        count = _num_local(hardware)
        instead = "hardware=cpu" + (f" hardware.num_processes={count}" if count > 1 else "")
        raise ConfigError(
            f"hardware.kind={hardware.kind} with hardware.num_processes={count} needs as many CUDA "
            f"devices, and torch {torch.__version__} sees {torch.cuda.device_count()}; use "
            f"{instead}, or see `draftlab doctor`"
        )
    elif "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # the target goes where "cuda" is
    # no refusal here: a run begun on a larger machine goes on, and is evaluated, on this one too
    problem = _explain_threads(hardware)
    if problem is not None:
        log.warning(problem)
    torch.set_num_threads(hardware.resolved().threads or 1)


def place_drafters(target: "Target", hardware: HardwareSettings) -> None:
    """Let drafters live where the settings say; call it when the target is loaded.

    Raises:
        ConfigError: a device that is not there, or the target's own.
    """
    if hardware.drafter_device is None:
        return
    import torch

    from draftlab.targets.load import check_device

    check_device(hardware.drafter_device, "hardware.drafter_device")
    device = torch.device(hardware.drafter_device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    if device == target.device:
        raise ConfigError(
            f"hardware.drafter_device={hardware.drafter_device} is where the target is; pass "
            "hardware.drafter_device=null, or another target.device"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # training takes the current device
    target.place_drafters(device)


def _num_local(hardware: HardwareSettings) -> int:
    """Count the processes of this machine; among several, the launcher tells only the processes."""
    if hardware.accelerate_config is None:
        return hardware.num_processes
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def launcher_command(hardware: HardwareSettings, words: list[str]) -> list[str]:
    """Give the command that starts `python -m WORDS` in every process of this machine."""
    # --multi_gpu means "through torchrun"; `launcher_environment` keeps cpu runs off devices
    count = str(hardware.num_processes)
    start = [sys.executable, "-m", "draftlab.cli.ranks", "--multi_gpu", "--num_processes", count]
    # the trainer's own affair, whatever a file says
    plain = ["--mixed_precision", "no", "--dynamo_backend", "no", "--module", *words]
    if hardware.accelerate_config is None:
        return [*start, "--num_machines", "1", "--main_process_port", "0", *plain]
    place = ["--config_file", str(hardware.accelerate_config)]
    if machine_rank() is not None:
        place += ["--machine_rank", str(machine_rank())]
    return [*start, *place, *plain]


def is_first_machine(hardware: HardwareSettings) -> bool:
    """Tell whether the first process runs on this machine.

    Raises:
        ConfigError: the launcher's file is missing or damaged.
    """
    path = hardware.accelerate_config
    if path is None:
        return True
    if machine_rank() is not None:
        return machine_rank() == 0
    try:
        return int(yaml.safe_load(path.read_text(encoding="utf-8")).get("machine_rank", 0)) == 0
    except (OSError, AttributeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"hardware.accelerate_config={path} cannot be read ({error}); expected the file that "
            "`accelerate config --config_file FILE` writes"
        ) from None


def machine_rank() -> int | None:
    """Tell which of several machines this is, 0.., as the environment says; None: it does not."""
    found = os.environ.get(MACHINE_RANK, os.environ.get("SLURM_NODEID", ""))
    return int(found) if found.isdecimal() else None


def launcher_environment(hardware: HardwareSettings) -> dict[str, str]:
    """Give the environment of the launched processes: ours, plus threads and device choice."""
    ours = {"OMP_NUM_THREADS": str(hardware.resolved().threads)}
    if hardware.kind == "cpu":
        ours |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **ours}
