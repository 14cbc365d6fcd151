"""What may stop a run that is valid: memory, devices, keys of the hub, the gate."""

import os

from draftlab.cli.accelerators import Accelerator
from draftlab.cli.estimate import Estimate, bytes_of_number
from draftlab.cli.memory_forecast import forecast_memory
from draftlab.cli.schema import RunSettings
from draftlab.data.unasked import UNASKED_ADVICE
from draftlab.runs.provenance import describe_gpus, memory_bytes
from draftlab.targets.published import published_model

_GB = 1e9
_KEYS = ("HF_TOKEN", "HF_TOKEN_PATH")


def list_warnings(settings: RunSettings, estimate: Estimate, accelerator: Accelerator) -> list[str]:
    """List what a person should look at before a run starts, most serious first."""
    found = _about_devices(settings)
    found += _about_memory(settings, estimate, accelerator)
    found += _about_speculation(settings, estimate)
    found += _about_hub(settings, estimate)
    found += _about_text(settings, estimate)
    return found


def _about_devices(settings: RunSettings) -> list[str]:
    hardware = settings.hardware
    if hardware.kind == "cpu" or hardware.accelerate_config is not None:
        return []
    import torch

    count = torch.cuda.device_count()
    if count >= hardware.num_processes:
        return []
    return [
        f"this run needs {hardware.num_processes} CUDA devices, one a process "
        f"(hardware.num_processes), and torch sees {count} here: it starts on another machine only"
    ]


def _about_memory(settings: RunSettings, estimate: Estimate, accelerator: Accelerator) -> list[str]:
    hardware = settings.hardware
    stages = {
        name: sum(parts.values()) for name, parts in forecast_memory(settings, estimate).items()
    }
    here = memory_bytes()
    if hardware.kind == "cpu":
        return [
            f"{stage} may take {hardware.num_processes * size / _GB:.1f} GB and this machine has "
            f"{here / _GB:.1f}: lower regenerate.batch_size or train.batch_rows, or take a smaller "
            "target"
            for stage, size in stages.items()
            if here is not None and hardware.num_processes * size > here
        ]
    owner, room = accelerator.name, accelerator.memory_bytes
    if gpus := describe_gpus():
        smallest = min(gpus, key=lambda gpu: gpu["memory_bytes"])
        owner, room = f"this machine's {smallest['name']}", smallest["memory_bytes"]
    found = [
        f"{stage} may take {size / _GB:.1f} GB a device, and {owner} has {room / _GB:.0f}: "
        f"{_MORE_ROOM[stage.partition(',')[0]]}"
        for stage, size in stages.items()
        if size > room
    ]
    outline = estimate.outline
    if hardware.cuts_target and outline is not None:
        whole = outline.num_parameters * bytes_of_number(estimate.dtype) * hardware.num_processes
        found.append(
            f"while it is loaded, each of the {hardware.num_processes} processes holds the whole "
            f"target in host memory: {whole / _GB:.0f} GB on one machine"
        )
    return found


_MORE_ROOM = {
    "answering": "lower regenerate.batch_size or data.max_tokens, or pass hardware.shard=target",
    "training": "lower train.batch_rows, pass train.gradient_checkpointing=true, or hardware=fsdp "
    "with hardware.shard=both",
    "decoding": "lower eval.batch_size, or take a larger device",
}


def _about_speculation(settings: RunSettings, estimate: Estimate) -> list[str]:
    outline = estimate.outline
    if outline is None:
        return []
    if outline.has_encoder:
        return [
            f"target {outline.name} has an encoder: draftlab decodes with it and trains nothing "
            "for it"
        ]
    if outline.refusal is None:
        return []
    return [
        f"target {outline.name} cannot be decoded speculatively ({outline.refusal}): its answers "
        "are written by whole passes, slowly, and no probe measures acceptance; "
        f"train.best_by={settings.train.best_by} then takes the last checkpoint"
    ]


def _about_hub(settings: RunSettings, estimate: Estimate) -> list[str]:
    names = [settings.target.name] if settings.target.source == "hub" else []
    names.append(getattr(settings.drafter, "model", None))
    cards = [(name, published_model(name)) for name in names if name]
    found = []
    has_key = any(key in os.environ for key in _KEYS)
    for name, card in cards:
        if card is not None and card.is_gated and not has_key:
            found.append(
                f"{name} is gated: accept the {card.licence} at https://huggingface.co/{name} and "
                "set HF_TOKEN"
            )
    outline = estimate.outline
    if settings.target.source == "hub" and outline is None:
        found.append(
            f"nothing is known of {settings.target.name} here: the hub did not give its "
            "config.json, so memory and hours are not told"
        )
    return found


def _about_text(settings: RunSettings, estimate: Estimate) -> list[str]:
    workload = estimate.workload
    if workload is None:
        return []
    found = [
        f"chats left out: {count} ({reason}); {UNASKED_ADVICE[reason]}"
        for reason, count in workload.unasked.items()
    ]
    if workload.num_unread:
        counted = "" if workload.unasked else "counted "
        found.append(
            f"rows of rendered text, {counted}unread: {workload.num_unread}; the tokenizer of "
            f"{settings.target.name or settings.target.source} cannot be had here, and training "
            "refuses text without the answer marker of its chat template"
        )
    return found
