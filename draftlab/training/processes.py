"""The processes that train together, as Accelerate knows them."""

import logging
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import distributed

from draftlab.errors import ConfigError

_REPLICATED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
)


def start_accelerator(device: torch.device, precision: str) -> Accelerator:
    """Join the processes that train together.

    Args:
        device: where the drafter is trained.
        precision: no or bf16.

    Raises:
        ConfigError: sharded training, or a device of another process.
    """
    # one process may train several times, each with its own precision
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        mixed_precision=precision,
        # drafters keep constants in buffers, nothing that a step changes
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            # the others wait while the first process probes and writes
            InitProcessGroupKwargs(timeout=timedelta(hours=1)),
        ],
    )
    if accelerator.distributed_type not in _REPLICATED:
        raise ConfigError(
            f"training under {accelerator.distributed_type.value} is not supported; a drafter is "
            "small: use plain data parallel (hardware=ddp)"
        )
    if _place(device) != _place(accelerator.device):
        raise ConfigError(
            f"the drafter belongs on {device}, but this process trains on {accelerator.device}; "
            "load the target on the process's own device"
        )
    return accelerator


def leave_group() -> None:
    """Leave the processes that trained together; nothing in a process that trained alone."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """End the process without tearing down the interpreter.

    Everything is written by now. The threads of torch's process group and of its autograd engine
    may still be waiting for the interpreter's lock while it goes away, which aborts the process
    ("terminate called without an active exception") after a run that went well.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _place(device: torch.device) -> tuple[str, int | None]:
    if device.type != "cuda":
        return device.type, None  # Accelerate numbers even the processor
    return device.type, torch.cuda.current_device() if device.index is None else device.index
