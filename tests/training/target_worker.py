"""A process of two or more over which a target is cut; writes down what it saw."""

import json
import os
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from toy_training import make_rows, run_training
from training_worker import UNEVEN_ANSWERS, world_training

from draftlab.settings.base import parse_settings
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import load_target
from draftlab.targets.settings import TargetSettings
from draftlab.targets.step import Step
from draftlab.targets.target import Target
from draftlab.targets.tiny import tiny_target
from draftlab.training.processes import end_process, leave_group, start_accelerator

PROMPT = [7, 90, 41, 3, 250]
TINY = {
    "source": "tiny",
    "name": None,
    "revision": None,
    "family": "llama",
    "seed": 0,
    "dtype": "float64",
    "device": "cpu",
    "kernels": "auto",
    "remote_code": "refuse",
    "cache_dir": "unused",
}
FLAVOURS = {"target": False, "both": True}  # is the drafter cut as well?


def tiny_settings(**changes) -> TargetSettings:
    return parse_settings(TargetSettings, {**TINY, **changes})


def answer(target: Target, count: int) -> list[int]:
    """Continue a prompt greedily; the number of passes depends on `count`."""
    kv = target.open_kv(1, 64)
    ids, fed = list(PROMPT), 0
    for _ in range(count):
        new = torch.tensor([ids[fed:]])
        step = Step(torch.tensor([0]), new, torch.tensor([fed]), len(ids))
        logits = target.run(kv, step).logits
        assert logits is not None
        fed = len(ids)
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def probe_of(target: Target):
    """A probe whose passes only the first process knows the number of."""
    return lambda step, drafter: {"tau": 1.0 + step, "told": float(sum(answer(target, 2 + step)))}


def look(target: Target, whole: Target) -> dict:
    """Compare a cut target with a whole one."""
    rank, is_first = int(os.environ["RANK"]), os.environ["RANK"] == "0"
    shards = [w for w in target.model.parameters() if isinstance(w, DTensor)]
    layers = whole.reference.anatomy.layers.parameters()
    rows = make_rows(whole, [9, 30, 14])
    needs = FeatureRequest((2, 4), wants_final=True)
    are_equal = []
    for number in range(3):  # the second process has one batch of its own
        if rank == 1 and number != 1:
            rows.skip_features(needs, target)
            continue
        batch = rows.tokens([number])
        found, expected = (t.read_features(batch, needs) for t in (target, whole))
        are_equal += [torch.equal(found.taps, expected.taps)]
        are_equal += [torch.equal(found.final, expected.final)]
    states = [
        torch.equal(weight, whole.view.layer_state(layer)[name])
        for layer in range(4)
        for name, weight in target.view.layer_state(layer).items()
    ]
    told = [
        target.run_on_first(lambda count=count: answer(target, count), is_first=is_first)
        for count in (3, 0, 5)
    ]
    hidden = torch.linspace(-1, 1, 64, dtype=torch.float64)
    return {
        "held": sum(w.to_local().untyped_storage().nbytes() for w in shards),
        "whole": sum(w.numel() * w.element_size() for w in layers),
        "uncut": [
            name for name, w in target.model.named_parameters() if not isinstance(w, DTensor)
        ],
        "checksums": [target.spec.checksum, whole.spec.checksum],
        "features": are_equal,
        "states": states,
        "heads": torch.equal(target.view.head(hidden), whole.view.head(hidden)),
        "told": told,
        "expected": [answer(whole, 3), [], answer(whole, 5)],
        "report": {k: target.report[k] for k in ("kernels", "cut_over_processes", "fast_refusal")},
    }


def train(out: Path, target: Target, *, resumed: bool) -> None:
    for name, is_sharded in FLAVOURS.items():
        folder = out / name
        _, _, numbers = run_training(
            folder,
            answers=UNEVEN_ANSWERS,
            target=target,
            train=world_training(int(os.environ["WORLD_SIZE"])),
            is_sharded=is_sharded,
            on_checkpoint=probe_of(target),
            resume_from=folder / "step-000003" if resumed else None,
        )
        (out / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(numbers.lines))


def main(mode: str, out: Path) -> None:
    start_accelerator(torch.device("cpu"), "no")
    target = load_target(tiny_settings(), is_sharded=True)
    if mode == "look":
        facts = look(target, tiny_target())
        (out / f"facts-{os.environ['RANK']}.json").write_text(json.dumps(facts))
    train(out, target, resumed=mode == "resume")
    leave_group()
    end_process(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]))
