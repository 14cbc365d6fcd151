"""The work behind `draftlab bench decode`: arms, the table, the JSON beside it.

Read `run`, then `_figures`: one line of the table as plain data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftlab.cli.words import read_options, refuse_replaced
from draftlab.errors import ConfigError, DraftlabError
from draftlab.targets.spec import name_with_quantisation

if TYPE_CHECKING:
    from draftlab.cli.schema import EvalCommandSettings
    from draftlab.decoding.decoder import Decoder
    from draftlab.decoding.settings import DecodeSettings
    from draftlab.evaluation.results import Estimate
    from draftlab.evaluation.speed import Answers, Timing
    from draftlab.targets.target import Target

_DEFAULTS = {"prompts": "12", "tokens": "128", "repeats": "1", "vllm_python": "", "out": ""}
_READ_EVAL_KEYS = ("eval.prompts=", "eval.seed=")
_REPLACED = {
    "decode.max_new_tokens": "bench.tokens",
    "decode.batch_size": "bench.prompts; they are answered one at a time",
}
_WARMUP_PROMPTS = 2
_HOST_PROMPTS, _HOST_TOKENS = 2, 48
_HOST_BAR = 0.10
_PASS_REPEATS = 9
_WIDTH = 132  # of the table where there is no terminal
_PROMPT_LOOKUP_TOKENS = 10  # transformers' documented choice
PLAIN, LOOKUP, OWN, NGRAM = "transformers", "transformers lookup", "draftlab", "draftlab ngram"
_MEANINGS = (
    "tokens/s, ratios: whole calls, prefill included; interval: 95 % over prompts, paired",
    "draft, verify: t_draft (proposal and observation) and t_verify(T) over t_AR, measured apart",
    "predicted: tau * t_AR / (t_draft + t_verify + t_misc); measured: decode time alone, both over "
    f"{OWN}",
    "host: share of a round outside target and drafter; peak: of the process, or of the device",
)


def run(words: Sequence[str]) -> int:
    """Measure, print the table and write the JSON."""
    own = [word for word in words if word.startswith("bench.")]
    rest = [word for word in words if not word.startswith("bench.")]
    options = read_options(own, _DEFAULTS, group="bench.")
    count, tokens, repeats = (_count(options, key) for key in ("prompts", "tokens", "repeats"))
    for word in rest:
        if word.startswith("eval.") and not word.startswith(_READ_EVAL_KEYS):
            raise ConfigError(
                f"{word} has no effect on bench decode; expected bench.prompts, bench.tokens, "
                "bench.repeats, eval.prompts or eval.seed"
            )
    refuse_replaced(rest, "bench decode", _REPLACED)
    from draftlab.cli.bench_out import find_out
    from draftlab.cli.bench_peers import find_vllm, time_vllm
    from draftlab.cli.drafters import compose_for_drafters
    from draftlab.cli.hardware import apply_hardware, place_drafters
    from draftlab.cli.measure import (
        load_eval_prompts,
        require_decoding,
        require_eval_prompts,
    )
    from draftlab.cli.progress import Ticker
    from draftlab.cli.schema import EvalCommandSettings, settings_of
    from draftlab.decoding.timing import DeviceClock
    from draftlab.evaluation.memory import PeakMemory
    from draftlab.evaluation.speed import measure
    from draftlab.files import write_atomic
    from draftlab.targets.load import load_target, resolve

    is_named = _names_drafters(rest)
    settings = settings_of(EvalCommandSettings, compose_for_drafters("eval", rest))
    if settings.decode.temperature != 0:
        raise ConfigError("bench decode compares greedy decoding; pass decode=greedy")
    require_decoding(settings.decode)
    out = find_out(options["out"], _default_out(settings))
    vllm = find_vllm(options["vllm_python"])
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    apply_hardware(settings.hardware, places_drafters=True)
    settings = settings.model_copy(update={"target": resolve(settings.target)})
    target = load_target(settings.target)
    place_drafters(target, settings.hardware)
    arms = _arms(target, settings, is_named)
    by_domain, _ = load_eval_prompts(
        target,
        settings.eval,
        settings.paths.cache / "data",
        template_options=settings.data.template_options,
    )
    prompts = _in_turns(by_domain, count)
    clock = DeviceClock(target.device)
    with Ticker("answers", len(arms) * (len(prompts) * repeats + _WARMUP_PROMPTS)) as ticker:
        timings = measure(
            arms,
            prompts,
            max_new_tokens=tokens,
            warmup_prompts=_WARMUP_PROMPTS,
            repeats=repeats,
            seed=settings.eval.seed,
            clock=clock,
            memory=PeakMemory(target.device),
            progress=lambda done, total: ticker.update(done),
        )
    ours = _ours(arms)
    models, shares = _explain(target, ours, prompts, timings, tokens)
    said = []
    if isinstance(vllm, str):
        said.append(vllm)
    else:
        try:
            peers, how = time_vllm(
                vllm, target, settings.target, settings.decode, prompts, tokens, repeats
            )
            timings += peers
            said.append(how)
        except DraftlabError as error:  # minutes of measuring are not lost for a peer
            said.append(str(error))
    order = [*arms, *dict.fromkeys(t.arm for t in timings if t.arm not in arms)]
    lines = [_figures(name, timings, models.get(name), shares.get(name)) for name in order]
    _print_table(lines)
    said += [s for name in models if (s := models[name].describe_gap(name)) is not None]
    high = [name for name, share in shares.items() if share.share > _HOST_BAR]
    if high:
        said.append(f"more than {_HOST_BAR:.0%} of a round is the decoder's own: {', '.join(high)}")
    if any(decoder.uses_graphs for decoder in ours.values()):
        said.append(
            "rounds ran as CUDA graphs, whose parts no clock tells apart; draftlab bench gpu times "
            "them one by one"
        )
    decode = settings.decode.model_copy(update={"max_new_tokens": tokens, "batch_size": 1})
    conditions = _conditions(target, decode, len(prompts), repeats)
    for line in (*_MEANINGS, *conditions["lines"], *said):
        print(line)
    record = {"bench": "decode", "arms": lines, "said": said, "conditions": conditions}
    write_atomic(out, json.dumps(record, indent=1) + "\n")
    print(f"written: {out}")
    return 0


def _count(options: Mapping[str, str], key: str) -> int:
    text = options[key]
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"bench.{key}={text!r}: expected a number of at least 1")
    return int(text)


def _default_out(settings: "EvalCommandSettings") -> Path:
    return settings.paths.outputs / "bench" / f"decode-{datetime.now():%Y%m%d-%H%M%S}.json"


def _names_drafters(words: Sequence[str]) -> bool:
    """Tell whether a drafter was named; the configuration's own is n-gram, an arm in any case."""
    return any(word.startswith(("drafter=", "drafters=")) for word in words)


def _arms(
    target: "Target", settings: "EvalCommandSettings", is_named: bool
) -> "dict[str, Answers]":
    from draftlab.cli.drafters import open_drafter
    from draftlab.decoding.decoder import Decoder
    from draftlab.decoding.plain import TransformersDecoding

    decode = settings.decode
    # a tree or a length is for the drafters named
    simple: DecodeSettings = decode.model_copy(
        update={"tree": None, "min_confidence": None, "num_draft_tokens": None, "fallback": False}
    )
    arms: dict[str, Answers] = {
        PLAIN: TransformersDecoding(target, decode),
        LOOKUP: TransformersDecoding(target, decode, prompt_lookup=_PROMPT_LOOKUP_TOKENS),
        OWN: Decoder(target, None, simple),
        NGRAM: Decoder(target, open_drafter("ngram", target), simple),
    }
    if not is_named:
        return arms
    for name in settings.drafters or (settings.drafter,):
        drafter = open_drafter(name, target)
        if drafter.kind == "ngram" and decode == simple:
            continue
        label = f"draftlab {drafter.kind}"
        while label in arms:
            label += "'"
        arms[label] = Decoder(target, drafter, decode)
    return arms


def _ours(arms: "Mapping[str, Answers]") -> "dict[str, Decoder]":
    from draftlab.decoding.decoder import Decoder

    return {name: arm for name, arm in arms.items() if isinstance(arm, Decoder)}


def _in_turns(prompts: Mapping[str, Sequence[Sequence[int]]], count: int) -> list[Sequence[int]]:
    """Take prompts from all domains in turn."""
    longest = max(len(items) for items in prompts.values())
    turns = [items[i] for i in range(longest) for items in prompts.values() if i < len(items)]
    if len(turns) < count:
        raise ConfigError(f"bench.prompts={count}, and there are {len(turns)} prompts; pass fewer")
    return turns[:count]


def _explain(
    target: "Target",
    ours: "Mapping[str, Decoder]",
    prompts: Sequence[Sequence[int]],
    timings: "Sequence[Timing]",
    tokens: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure the parts of a round alone, and compare every drafter's arm with their sum."""
    from draftlab.decoding.host_share import measure_host_share
    from draftlab.decoding.timing import DeviceClock
    from draftlab.evaluation.cost_model import compare_with_model, measure_passes

    steps = [step for t in timings if t.arm in ours for step in t.generation.steps]
    widths = sorted({1, *(step.num_drafted + 1 for step in steps)})
    longest = max(len(prompt) for prompt in prompts)
    base = min(
        sum(map(len, prompts)) // len(prompts) + tokens // 2,
        max(1, target.spec.max_positions - widths[-1]),
    )
    curve = measure_passes(
        target,
        widths=widths,
        base=min(base, longest + tokens),
        rows=1,
        repeats=_PASS_REPEATS,
        clock=DeviceClock(target.device),
    )
    few = list(prompts[:_HOST_PROMPTS])
    shares = {
        name: measure_host_share(decoder, few, max_new_tokens=min(tokens, _HOST_TOKENS))
        for name, decoder in ours.items()
        if not decoder.uses_graphs
    }
    shares = {name: share for name, share in shares.items() if share.num_rounds}
    models = {}
    for name in shares:
        if name != OWN and OWN in shares:
            model = compare_with_model(timings, arm=name, baseline=OWN, curve=curve, shares=shares)
            if model is not None:
                models[name] = model
    return models, shares


def _figures(name: str, timings: "Sequence[Timing]", model: Any, share: Any) -> dict[str, Any]:
    """Collect what one line of the table says."""
    from draftlab.evaluation.speed import compute_speed

    mine = [t for t in timings if t.arm == name]
    steps = [s for t in mine for s in t.generation.steps]
    figures: dict[str, Any] = {
        "arm": name,
        "tokens_per_s": sum(len(t.generation.output_ids) for t in mine)
        / sum(t.wall_s for t in mine),
        "num_identical_to_draftlab": None,
    }
    for base in (PLAIN, LOOKUP, OWN):
        stats = None if base == name else compute_speed(timings, arm=name, baseline=base)
        figures[f"over {base}"] = None if stats is None else asdict(stats.end_to_end_speedup)
        if base == OWN and stats is not None:
            figures["num_identical_to_draftlab"] = stats.num_identical
    is_ours = name.startswith(OWN)
    figures["tau"] = sum(s.num_emitted for s in steps) / len(steps) if is_ours and steps else None
    figures["model"] = None
    if model is not None:
        figures["model"] = asdict(model) | {"predicted": model.predicted, "gap": model.gap}
    figures["host_share"] = None if share is None else share.share
    peaks = [t.peak_bytes for t in mine if t.peak_bytes is not None]
    figures["peak_bytes"] = max(peaks) if peaks else None
    return figures


def _print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    import sys

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("arm")
    for head in (
        "tokens/s",
        f"over\n{PLAIN}",
        "over\nits lookup",
        f"over\n{OWN}",
        "tau",
        "draft",
        "verify",
        "pre-\ndicted",
        "mea-\nsured",
        "host",
        "peak\nMB",
    ):
        table.add_column(head, justify="right")
    for line in lines:
        model, peak, share = line["model"], line["peak_bytes"], line["host_share"]
        parts = ["-"] * 4
        if model is not None:
            plain = model["plain_s"]
            parts = [
                f"{model['draft_s'] / plain:.2f}",
                f"{model['verify_s'] / plain:.2f}",
                f"{model['predicted']:.2f}",
                f"{model['measured']:.2f}",
            ]
        table.add_row(
            line["arm"],
            f"{line['tokens_per_s']:.1f}",
            *(_ratio(line[f"over {base}"]) for base in (PLAIN, LOOKUP, OWN)),
            "-" if line["tau"] is None else f"{line['tau']:.2f}",
            *parts,
            "-" if share is None else f"{share:.1%}",
            "-" if peak is None else f"{peak / 1e6:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _ratio(found: "Mapping[str, Any] | Estimate | None") -> str:
    if not isinstance(found, Mapping) or found["value"] is None:
        return "-"
    span = "" if found["low"] is None else f"\n{found['low']:.2f}-{found['high']:.2f}"
    return f"{found['value']:.2f}{span}"


def _conditions(
    target: "Target", decode: "DecodeSettings", prompts: int, repeats: int
) -> dict[str, Any]:
    from draftlab.evaluation.conditions import describe_law
    from draftlab.runs.provenance import describe_machine, describe_versions

    machine, versions, spec = describe_machine(), describe_versions(), target.spec
    named = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers"))
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) if target.device.type != "cpu" else ""
    lines = [
        f"{prompts} prompts x {repeats}, at most {decode.max_new_tokens} tokens each, batch 1, "
        f"{describe_law(decode)}{', past end tokens' if decode.ignore_eos else ''}, arms in turns",
        f"{name_with_quantisation(spec.name, spec.quantisation)}, {spec.dtype}, "
        f"kernels {target.report['kernels']}",
        f"{gpus or machine['cpu']}, {machine['torch_threads']} threads, {named}",
    ]
    return {
        "lines": lines,
        "target": spec.to_json(),
        "decode": decode.model_dump(mode="json"),
        "machine": machine,
        "versions": versions,
        "kernels": target.report["kernels"],
        "attention": target.report.get("attention"),
        "device": str(target.device),
    }
