"""On what a run runs, and the launcher's words derived from that alone."""

import os
import sys
from typing import Literal

from pydantic import PositiveInt, model_validator

from draftlab.errors import ConfigError
from draftlab.runs.provenance import num_cores
from draftlab.settings.base import Settings


class HardwareSettings(Settings):
    """Keys of conf/hardware/*.yaml.

    Attributes:
        kind: processor, one CUDA device, or one CUDA device a process.
        num_processes: processes that train together.
        threads: threads of each process; None takes OMP_NUM_THREADS where that is set, else shares
            the cores among the processes.
    """

    kind: Literal["cpu", "single_gpu", "ddp"]
    num_processes: PositiveInt
    threads: PositiveInt | None

    @model_validator(mode="after")
    def _fits(self) -> "HardwareSettings":
        if self.kind == "single_gpu" and self.num_processes != 1:
            raise ValueError(
                f"hardware=single_gpu runs one process, not {self.num_processes}; "
                "use hardware=ddp for one process a device"
            )
        return self

    def resolved(self) -> "HardwareSettings":
        """Decide what was left open, once, so that a resumed run computes the same."""
        wanted = os.environ.get("OMP_NUM_THREADS", "")
        shared = max(1, num_cores() // self.num_processes)
        threads = self.threads or (int(wanted) if wanted.isdecimal() and int(wanted) else shared)
        return self.model_copy(update={"threads": threads})


def apply_hardware(hardware: HardwareSettings) -> None:
    """Set this process's threads, and hide or demand CUDA; call it before anything runs.

    Raises:
        ConfigError: a device is asked for and there is none.
    """
    import torch

    if hardware.kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CUDA starts lazily: nothing has looked yet
    elif torch.cuda.device_count() < hardware.num_processes:
        raise ConfigError(
            f"hardware={hardware.kind} with num_processes={hardware.num_processes} needs as many "
            f"CUDA devices, and torch {torch.__version__} sees {torch.cuda.device_count()}; use "
            "hardware=cpu, or see `draftlab doctor`"
        )
    elif "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # the target goes where "cuda" is
    torch.set_num_threads(hardware.resolved().threads or 1)


def launcher_command(hardware: HardwareSettings, words: list[str]) -> list[str]:
    """Give the command that starts `python -m WORDS` in every process."""
    # --multi_gpu means "through torchrun"; `launcher_environment` keeps cpu runs off devices
    return [
        *(sys.executable, "-m", "draftlab.cli.ranks", "--multi_gpu"),
        *("--num_machines", "1", "--num_processes", str(hardware.num_processes)),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),  # the trainer's own affair
        *("--main_process_port", "0", "--module", *words),
    ]


def launcher_environment(hardware: HardwareSettings) -> dict[str, str]:
    """Give the environment of the launched processes: ours, plus threads and device choice."""
    ours = {"OMP_NUM_THREADS": str(hardware.resolved().threads)}
    if hardware.kind == "cpu":
        ours |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **ours}
