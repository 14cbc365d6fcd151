"""A process that trains adapters together with others, or is killed while it does."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from toy_training import optim_settings, run_training, toy_drafter, train_settings

from draftlab.drafters.adapters import AdapterSettings, BaseDrafter, adapt
from draftlab.targets.tiny import tiny_target
from draftlab.training.processes import end_process, leave_group

ANSWERS = [2, 40, 7, 19, 25, 3, 11, 30]
OPTIM = optim_settings(warmup_fraction=1 / 3, ema_decay=0.9, weight_decay=0.05)
STEP_ROWS = 4  # of an optimizer step, however many processes share them
WORLD = {"replicated": False, "sharded": True}


def adapted(target, rank=4, alpha=8.0, seed=7, drafter=None):
    """The toy heads, whose base is made anew from their settings, with adapters."""
    drafter = drafter or toy_drafter(target)
    settings = AdapterSettings(kind="lora", rank=rank, alpha=alpha)
    adapt(drafter, settings, BaseDrafter(None, "0" * 64), seed=seed)
    return drafter


def limits(processes, **changes):
    """Settings of a training that any number of processes shares."""
    plain = {
        "max_steps": 9,
        "save_every_steps": 3,
        "keep_checkpoints": 9,
        "batch_rows": 1,
        "accumulation": STEP_ROWS // processes,
    }
    return train_settings(**(plain | changes))


def train(folder, processes, **options):
    """Train adapters on the toy heads; give what `run_training` does."""
    target = tiny_target()
    options = {"on_checkpoint": lambda step, drafter: {"tau": 1.0 + step}} | options
    return run_training(
        folder,
        answers=ANSWERS,
        target=target,
        drafter=options.pop("drafter", None) or adapted(target),
        optim=OPTIM,
        train=limits(processes),
        **options,
    )


def run_in_world(out: Path) -> None:
    processes = int(os.environ["WORLD_SIZE"])
    for name, is_sharded in WORLD.items():
        _, _, numbers = train(out / name, processes, is_sharded=is_sharded)
        (out / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(numbers.lines))
    leave_group()
    end_process(0)


def run_and_die(folder: Path, after_step: int) -> None:
    def metrics(step, split, **numbers):
        if step == after_step:
            os.kill(os.getpid(), signal.SIGKILL)

    train(folder, 1, metrics=metrics)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, place, *rest = sys.argv[1:]
    if mode == "in-world":
        run_in_world(Path(place))
    else:
        run_and_die(Path(place), int(rest[0]))
