"""A process of its own for tests that kill it, or that need two of it."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from toy_training import make_rows, optim_settings, run_training, toy_drafter, train_settings

from draftlab.runs.metrics_log import MetricsLog
from draftlab.targets.tiny import tiny_target
from draftlab.training import checkpoints
from draftlab.training.processes import end_process, leave_group

RESUME_ANSWERS = [2, 40, 7, 19, 25, 3, 11, 30, 5]
RESUME_OPTIM = optim_settings(
    kind="muon", adamw_lr=0.003, warmup_fraction=1 / 3, ema_decay=0.9, schedule="linear"
)
RESUME_TRAIN = train_settings(max_steps=12, save_every_steps=3, accumulation=2)
EVEN_ANSWERS = [2, 40, 7, 19, 25, 3, 11, 30]
UNEVEN_ANSWERS = [12, 0, 40, 0, 9, 0, 21]


WORLD_ANSWERS = [2, 40, 7, 19, 25, 3, 11]
WORLD_ROWS = 4  # of an optimizer step, however many processes share them
WORLD_FLAVOURS = {
    "replicated": (False, optim_settings()),
    "sharded": (True, optim_settings()),
    "sharded-muon": (True, optim_settings(kind="muon", adamw_lr=0.003, ema_decay=0.9)),
}


def world_training(processes: int):
    """Settings of a training that any number of processes shares."""
    return train_settings(
        max_steps=6,
        save_every_steps=3,
        keep_checkpoints=9,
        batch_rows=1,
        accumulation=WORLD_ROWS // processes,
    )


def run_in_world(out: Path, resumed: bool) -> None:
    """Train every flavour: from the start, or on from the checkpoint in the middle."""
    processes = int(os.environ["WORLD_SIZE"])
    target = tiny_target()
    for name, (is_sharded, optim) in WORLD_FLAVOURS.items():
        folder = out / name
        _, _, numbers = run_training(
            folder,
            answers=WORLD_ANSWERS,
            target=target,
            optim=optim,
            train=world_training(processes),
            is_sharded=is_sharded,
            on_checkpoint=lambda step, drafter: {"tau": 1.0 + step},
            resume_from=folder / "step-000003" if resumed else None,
        )
        (out / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(numbers.lines))
    leave_group()
    end_process(0)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(run: Path, *, after_step: int | None, in_checkpoint: int | None) -> None:
    log = MetricsLog(run / "metrics.jsonl")

    def metrics(step, split, **numbers):
        log.log(step, split, **numbers)
        if step == after_step:
            die()

    if in_checkpoint is not None:
        write_state = checkpoints.write_state

        def half_written(folder, progress, tensors):
            write_state(folder, progress, tensors)
            if progress.step == in_checkpoint:
                (folder / "state" / "state.json").write_text("{")
                die()

        sys.modules["draftlab.training.trainer"].write_state = half_written
    run_training(
        run / "checkpoints",
        answers=RESUME_ANSWERS,
        optim=RESUME_OPTIM,
        train=RESUME_TRAIN,
        metrics=metrics,
    )


def run_rank(out: Path) -> None:
    target = tiny_target()
    rank = os.environ["RANK"]
    for name, answers, batch_rows, accumulation in (
        ("even", EVEN_ANSWERS, 2, 1),
        ("uneven", UNEVEN_ANSWERS, 1, 2),
        ("uneven-tokens", UNEVEN_ANSWERS, 1, 2),
    ):
        _, drafter, numbers = run_training(
            out / name,
            answers=answers,
            target=target,
            drafter=toy_drafter(target, averages_tokens=name.endswith("tokens")),
            rows=make_rows(target, answers),
            train=train_settings(batch_rows=batch_rows, accumulation=accumulation),
        )
        weights = {key: value.detach().clone() for key, value in drafter.state_dict().items()}
        save_file(weights, out / f"{name}-{rank}.safetensors")
        (out / f"{name}-{rank}.json").write_text(json.dumps(numbers.lines))
    leave_group()
    end_process(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, place, *rest = sys.argv[1:]
    if mode == "rank":
        run_rank(Path(place))
    elif mode in ("begin-in-world", "resume-in-world"):
        run_in_world(Path(place), resumed=mode == "resume-in-world")
    elif mode == "die-after-step":
        run_and_die(Path(place), after_step=int(rest[0]), in_checkpoint=None)
    else:
        run_and_die(Path(place), after_step=None, in_checkpoint=int(rest[0]))
