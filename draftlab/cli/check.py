"""`draftlab check`: everything that can go wrong before a run, without running."""

import shlex
from typing import TYPE_CHECKING

from draftlab.cli.disk import describe_bytes, free_bytes
from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError
from draftlab.settings.compose import compose

if TYPE_CHECKING:
    from draftlab.cli.accelerators import Accelerator
    from draftlab.cli.estimate import Estimate, Workload
    from draftlab.cli.hardware import HardwareSettings
    from draftlab.cli.schema import RunSettings
    from draftlab.drafters.adapters import AdapterSettings
    from draftlab.training.settings import TrainSettings

HELP = """
usage: draftlab check [accelerator=h100] [key=value ...]      the words of `draftlab train`

Composes the settings, checks every key, reads the data's text (each bad line is named), and says
what would run and what it will take: memory of a device part by part, disk, hours. Loads no model;
of a hub model it reads config.json (a few kilobytes) where the hub answers, else what is published
of the models that recipes name, and the tokenizer where rows are text rendered by its template.
Exits 2 when the run could not work.

  probe=true         load the target, answer a few prompts and take a few training steps here, in
                     about half a minute beyond loading: hours and memory measured, not estimated

  accelerator=NAME   whose speed and memory hours are told for, where the run uses CUDA: rtx4090,
                     l40s, a100, h100 (the default), h200, b200

Without a probe, memory and hours are estimates from sizes and from the shares of the peak that are
printed, at answers of full length.

examples:
  draftlab check recipe=smoke/tiny
  draftlab check recipe=eagle3/qwen3-8b accelerator=h200
  draftlab check target=demo drafter=eagle3 data=jsonl data.paths=~/chats.jsonl
"""

_GB = 1e9


def run(args: list[str]) -> int:
    """Check a run and estimate it."""
    _, words = split_words(args, most=0)
    own = [word for word in words if word.startswith(("accelerator=", "probe="))]
    words = [word for word in words if word not in own]
    options = read_options(own, {"accelerator": "h100", "probe": "false"})
    if options["probe"] not in ("true", "false"):
        raise ConfigError(f"probe={options['probe']}: expected true or false")
    resume = compose("train", words).data[
        "resume"
    ]  # a misspelt word is told before torch is loaded
    if resume not in ("auto", "never"):
        raise ConfigError(
            f"resume={resume}: a run goes on with its own settings, and check looks at those of a "
            "new one; drop it, or pass resume=auto or resume=never"
        )
    from draftlab.cli.accelerators import find_accelerator
    from draftlab.cli.estimate import require_training
    from draftlab.cli.launch import compose_run, require_inputs
    from draftlab.cli.run_warnings import list_warnings
    from draftlab.data.conversations import describe_bad_lines

    accelerator = find_accelerator(options["accelerator"])
    settings, composed = compose_run(words)
    estimate = require_inputs(settings, asks_hub=True)
    chosen = ", ".join(f"{group}={name}" for group, name in composed.choices.items() if name)
    hardware = settings.hardware.resolved()
    lines = {
        "choices": chosen,
        "target": _describe_target(settings, estimate),
        **_describe_card(estimate),
        "speculation": _describe_speculation(estimate),
        "drafter": _describe_drafter(settings, estimate),
        "processes": _describe_processes(hardware),
    }
    if not estimate.trains_nothing:
        lines |= {
            "starts from": settings.init or "fresh weights",
            "trains": _describe_trained(settings.adapter),
            "data": f"{settings.data.kind}, {_describe_workload(estimate.workload)}",
            "ends after": _limits(settings.train),
            "features": _describe_features(settings, estimate),
            "minutes": _minutes(estimate.minutes),
            "would write": f"{settings.paths.outputs / (composed.recipe or 'adhoc')}/TIME-ID/",
        }
    for name, text in lines.items():
        print(f"{name:<15} {text}")
    if estimate.workload is not None and estimate.workload.bad_lines:
        print(f"\nskipped bad lines:\n{describe_bad_lines(estimate.workload.bad_lines)}")
    _print_memory(settings, estimate, accelerator)
    _print_disk(settings, estimate)
    is_told = settings.hardware.kind != "cpu" and _print_time(settings, estimate, accelerator)
    if not (is_told or estimate.trains_nothing or options["probe"] == "true"):
        print("\nhours cannot be told from sizes alone; probe=true measures them here")
    if options["probe"] == "true":
        require_training(estimate, settings.drafter.kind)
        _print_pace(settings, estimate)
    for warning in list_warnings(settings, estimate, accelerator):
        print(f"warning: {warning}")
    if estimate.trains_nothing:
        print(f"\nall settings are valid; measure it: draftlab eval {shlex.join(words)}".rstrip())
    else:
        print(f"\nall settings are valid; start it: draftlab train {shlex.join(words)}".rstrip())
    return 0


def _describe_target(settings: "RunSettings", estimate: "Estimate") -> str:
    target, outline = settings.target, estimate.outline
    name = f"{target.source} {target.name or ''}".rstrip()
    if outline is None:
        size = describe_bytes(estimate.memory_bytes)
        return f"{name}: {size} of weights; more is known once it is loaded"
    active = ""
    if outline.experts[1] > 1:
        active = (
            f" ({_billions(outline.num_active)} for a token: {outline.experts[0]} of "
            f"{outline.experts[1]} experts a layer)"
        )
    return (
        f"{name}: {_billions(outline.num_parameters)} parameters{active}, {estimate.dtype}; "
        f"sizes: {outline.origin}"
    )


def _describe_processes(hardware: "HardwareSettings") -> str:
    cut = "" if hardware.shard == "none" else f", shard={hardware.shard}"
    return f"{hardware.num_processes} x {hardware.threads} threads ({hardware.kind}{cut})"


def _describe_trained(adapter: "AdapterSettings") -> str:
    if adapter.kind == "none":
        return "the drafter itself"
    return f"adapters of rank {adapter.rank}, alpha {adapter.alpha:g}; the drafter stays as it is"


def _describe_card(estimate: "Estimate") -> dict[str, str]:
    card = estimate.outline.card if estimate.outline else None
    if card is None:
        return {}
    gate = "; the hub asks for its acceptance and HF_TOKEN" if card.is_gated else ""
    return {"licence": f"{card.licence}{gate}"}


def _describe_speculation(estimate: "Estimate") -> str:
    outline = estimate.outline
    if outline is None:
        return "unknown until the target is loaded"
    if outline.refusal is not None:
        return f"refused: {outline.refusal}; it trains drafters and answers plainly"
    return "exact, as far as the config tells; loading compares numbers"


def _describe_drafter(settings: "RunSettings", estimate: "Estimate") -> str:
    text = f"{settings.drafter.kind}, K = {settings.drafter.num_draft_tokens}"
    size = estimate.drafter
    if size is None:
        return f"{text}; its size is known once it is built"
    if size.num_parameters == 0:
        return f"{text}, no weights"
    trained = _billions(size.num_trainable) if size.num_trainable else "none"
    return f"{text}, {_billions(size.num_parameters)} parameters, {trained} of them trained"


def _describe_workload(workload: "Workload | None") -> str:
    if workload is None:
        return "unknown number of chats to train on; data.max_samples=N bounds it"
    return f"{workload.num_prompts:,} chats to train on"


def _describe_features(settings: "RunSettings", estimate: "Estimate") -> str:
    if settings.data.answers == "given" or not settings.regenerate.capture_features:
        return "none are kept: training runs the target itself"
    if estimate.disk_bytes is None or estimate.token_bytes is None:
        return "unknown until the target or the number of chats is"
    return (
        f"{estimate.token_bytes:,} bytes a token ({settings.regenerate.features_dtype} dtype), "
        f"about {describe_bytes(estimate.disk_bytes)} of disk at answers of full length, "
        f"{describe_bytes(free_bytes(settings.paths.outputs))} free"
    )


def _print_memory(
    settings: "RunSettings", estimate: "Estimate", accelerator: "Accelerator"
) -> None:
    from draftlab.cli.memory_forecast import forecast_memory
    from draftlab.runs.provenance import memory_bytes

    here = memory_bytes()
    if settings.hardware.kind == "cpu":
        owner = "each process" if settings.hardware.num_processes > 1 else "this process"
        limit = f"this machine has {here / _GB:.0f} GB" if here else "of this machine's"
    else:
        owner, limit = "each device", accelerator.name
    stages = forecast_memory(settings, estimate)
    if stages:
        print(f"\nmemory of {owner}, estimated, GB of 10^9 bytes ({limit})")
    for stage, parts in stages.items():
        print(f"  {stage:<38} {sum(parts.values()) / _GB:>8.2f}")
        for part, size in parts.items():
            print(f"    {part:<36} {size / _GB:>8.2f}")


def _print_disk(settings: "RunSettings", estimate: "Estimate") -> None:
    from draftlab.cli.disk_forecast import forecast_disk

    parts = forecast_disk(settings, estimate)
    if parts:
        print("\ndisk, estimated, GB")
    for part, size in parts.items():
        print(f"  {part:<38} {size / _GB:>8.2f}")


def _print_time(settings: "RunSettings", estimate: "Estimate", accelerator: "Accelerator") -> bool:
    """Print hours, and tell whether any could be told."""
    from draftlab.cli.time_forecast import BANDWIDTH_SHARE, FLOPS_SHARE, forecast_time

    found = forecast_time(settings, estimate, accelerator)
    if found.plain_tokens_per_s is None:
        return False
    count = settings.hardware.num_processes
    print(
        f"\ntime, estimated for {count} x {accelerator.name}, not measured: {FLOPS_SHARE:.0%} of "
        f"{accelerator.flops / 1e12:.0f} TFLOP/s, {BANDWIDTH_SHARE:.0%} of "
        f"{accelerator.bytes_per_s / 1e12:.2f} TB/s, every answer at its limit"
    )
    if found.answers is not None:
        helped = "" if count == 1 else "; the first process answers"
        note = f"{found.answer_tokens / 1e6:.1f} million tokens{helped}"
        print(f"  {'answers, hours':<38} {found.answers:>8.1f}   {note}")
    if found.training is not None:
        note = ""
        if found.training_tokens is not None:
            note = f"{found.training_tokens / 1e6:.0f} million tokens"
        print(f"  {'training, hours':<38} {found.training:>8.1f}   {note}".rstrip())
    pace = found.plain_tokens_per_s
    print(f"  {'plain decoding at batch 1, tokens/s':<38} {pace:>8.0f}")
    return True


def _print_pace(settings: "RunSettings", estimate: "Estimate") -> None:
    from draftlab.cli.pace import measure_pace
    from draftlab.cli.time_forecast import training_tokens

    print("\nmeasuring on this machine ...", flush=True)
    pace, workload = measure_pace(settings), estimate.workload
    count = settings.hardware.num_processes
    print(f"measured here in {pace.seconds:.0f} s, one process of {count}")
    answers = workload.num_answers * settings.regenerate.max_new_tokens if workload else None
    trained = training_tokens(settings, workload) if workload else None
    if trained is not None:
        trained /= count
    stages = {"answers": (pace.answering, answers), "training": (pace.training, trained)}
    for stage, (rate, tokens) in stages.items():
        if rate is not None:
            print(f"  {stage + ', tokens/s':<38} {rate:>8.0f}")
            if tokens is not None:
                note = f"at most, for {tokens:,.0f} tokens"
                print(f"  {stage + ', minutes':<38} {tokens / rate / 60:>8.1f}   {note}")
    if pace.plain is not None:
        print(f"  {'plain decoding at batch 1, tokens/s':<38} {pace.plain:>8.1f}")
    if pace.memory_bytes is not None:
        print(f"  {'memory at its highest, GB':<38} {pace.memory_bytes / _GB:>8.2f}")


def _limits(train: "TrainSettings") -> str:
    names = {"max_steps": "steps", "max_epochs": "passes over the data", "max_minutes": "minutes"}
    limits = [f"{getattr(train, key)} {what}" for key, what in names.items() if getattr(train, key)]
    return " or ".join(limits)


def _minutes(bound: float | None) -> str:
    if bound is None:
        return "no bound; train.max_minutes=N bounds the optimizer steps"
    return f"at most {bound:g} for the optimizer steps; answers and probes come on top"


def _billions(count: int) -> str:
    if count < 1e5:
        return f"{count:,}"
    return f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"
