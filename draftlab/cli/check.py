"""`draftlab check`: everything that can go wrong before a run, without running."""

import shlex
from typing import TYPE_CHECKING

from draftlab.cli.disk import describe_bytes, free_bytes
from draftlab.cli.words import split_words

if TYPE_CHECKING:
    from draftlab.training.settings import TrainSettings

HELP = """
usage: draftlab check [key=value ...]      the words of `draftlab train`

Composes the settings, checks every key, reads the data's text (each bad line is named), and says
what would run and what it will take: memory, disk, minutes where known. Loads no model, writes
and downloads nothing. Exits 2 when the run could not work.

examples:
  draftlab check recipe=smoke/tiny
  draftlab check target=demo drafter=eagle3 data=jsonl data.paths=~/chats.jsonl
"""


def run(args: list[str]) -> int:
    """Check a run and estimate it."""
    from draftlab.cli.launch import compose_run, require_inputs
    from draftlab.runs.provenance import memory_bytes

    _, words = split_words(args, most=0)
    settings, composed = compose_run(words)
    hardware = settings.hardware.resolved()
    estimate = require_inputs(settings)
    chosen = ", ".join(f"{group}={name}" for group, name in composed.choices.items() if name)
    lines = {
        "choices": chosen,
        "target": f"{settings.target.source} {settings.target.name or ''}".rstrip(),
        "drafter": f"{settings.drafter.kind}, K = {settings.drafter.num_draft_tokens}",
        "starts from": settings.init or "fresh weights",
        "data": f"{settings.data.kind}, {_or_unknown(estimate.num_prompts, 'chats to train on')}",
        "ends after": _limits(settings.train),
        "processes": f"{hardware.num_processes} x {hardware.threads} threads ({hardware.kind})",
        "target weights": f"{describe_bytes(estimate.memory_bytes)} of memory, "
        f"{describe_bytes(memory_bytes())} in this machine",
        "features": f"{_or_unknown(estimate.token_bytes, 'bytes')} a token "
        f"({settings.regenerate.features_dtype} dtype), about "
        f"{describe_bytes(estimate.disk_bytes)} of disk at answers of full length, "
        f"{describe_bytes(free_bytes(settings.paths.outputs))} free",
        "minutes": _minutes(estimate.minutes),
        "would write": f"{settings.paths.outputs / (composed.recipe or 'adhoc')}/TIME-ID/",
    }
    if estimate.disk_bytes is None:
        lines["features"] = "none are kept, or how many is unknown until the target is here"
    for name, text in lines.items():
        print(f"{name:<15} {text}")
    print(f"\nall settings are valid; start it: draftlab train {shlex.join(words)}".rstrip())
    return 0


def _limits(train: "TrainSettings") -> str:
    names = {"max_steps": "steps", "max_epochs": "passes over the data", "max_minutes": "minutes"}
    limits = [f"{getattr(train, key)} {what}" for key, what in names.items() if getattr(train, key)]
    return " or ".join(limits)


def _minutes(bound: float | None) -> str:
    if bound is None:
        return "unknown; train.max_minutes=N bounds the optimizer steps"
    return f"at most {bound:g} for the optimizer steps; answers and probes come on top"


def _or_unknown(count: int | None, what: str) -> str:
    return f"unknown number of {what}" if count is None else f"{count:,} {what}"
