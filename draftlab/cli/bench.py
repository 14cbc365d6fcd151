"""`draftlab bench decode`: decoding speed beside transformers', in one run."""

from collections.abc import Sequence

from draftlab.cli.words import split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab bench decode [target=demo] [drafter=DRAFTER] [key=value ...]

Times, prompt by prompt in turns: transformers' generate, its prompt lookup, draftlab without a
drafter, draftlab with n-gram drafting, and the drafter named. Batch 1, greedy, the whole call timed
(prefill included) for every arm. Prints tokens per second, ratios with 95 % intervals, and the
conditions.

  drafter=RUN                  a trained drafter as a further arm (default: none, ngram only)
  eval.speed_max_new_tokens=128 eval.speed_prompts_per_domain=1 eval.repeats=1

examples:
  draftlab bench decode target=demo
  draftlab bench decode drafter=outputs/demo/20261129-101500-ab12
"""

_PROMPT_LOOKUP_TOKENS = 10  # transformers' documented choice
_PLAIN, _LOOKUP, _OWN, _NGRAM = "transformers", "transformers lookup", "draftlab", "draftlab ngram"


def run(args: Sequence[str]) -> int:
    """Measure and print the table."""
    things, words = split_words(args, most=1)
    if things != ["decode"]:
        raise ConfigError(f"bench what? got {' '.join(things) or 'nothing'}; expected: decode")
    from rich.console import Console
    from rich.table import Table

    from draftlab.cli.drafters import compose_for_drafters, open_drafter
    from draftlab.cli.hardware import apply_hardware
    from draftlab.cli.measure import load_eval_prompts, require_eval_prompts
    from draftlab.cli.progress import Ticker
    from draftlab.cli.schema import EvalCommandSettings, settings_of
    from draftlab.decoding.decoder import Decoder
    from draftlab.decoding.plain import TransformersDecoding
    from draftlab.decoding.timing import DeviceClock
    from draftlab.evaluation.speed import Answers, compute_speed, measure
    from draftlab.runs.provenance import describe_machine, describe_versions
    from draftlab.targets.load import load_target

    named = any(word.startswith("drafter=") for word in words)
    settings = settings_of(EvalCommandSettings, compose_for_drafters("eval", words))
    decode = settings.decode
    if decode.temperature != 0:
        raise ConfigError("bench decode compares greedy decoding; pass decode=greedy")
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    apply_hardware(settings.hardware)
    target = load_target(settings.target)
    ngram = open_drafter("ngram", target)
    arms: dict[str, Answers] = {
        _PLAIN: TransformersDecoding(target, decode),
        _LOOKUP: TransformersDecoding(target, decode, prompt_lookup=_PROMPT_LOOKUP_TOKENS),
        _OWN: Decoder(target, None, decode),
        _NGRAM: Decoder(target, ngram, decode),
    }
    if named and settings.drafter != "ngram" and getattr(settings.drafter, "kind", "") != "ngram":
        drafter = open_drafter(settings.drafter, target)
        arms[f"draftlab {drafter.kind}"] = Decoder(target, drafter, decode)
    prompts, _ = load_eval_prompts(target, settings.eval, settings.paths.cache / "data")
    take = max(1, settings.eval.speed_prompts_per_domain)
    ids = [p for domain in prompts.values() for p in domain[:take]]
    with Ticker("answers", len(arms) * (len(ids) * settings.eval.repeats + 2)) as ticker:
        timings = measure(
            arms,
            ids,
            max_new_tokens=settings.eval.speed_max_new_tokens,
            warmup_prompts=2,
            repeats=settings.eval.repeats,
            seed=settings.eval.seed,
            clock=DeviceClock(target.device),
            progress=lambda done, total: ticker.update(done),
        )
    table = Table("arm", "tokens/s", f"over {_PLAIN}", f"over {_LOOKUP}", f"over {_OWN}", "tau")
    for name in arms:
        mine = [t for t in timings if t.arm == name]
        tokens = sum(len(t.generation.output_ids) for t in mine)
        rate = tokens / sum(t.wall_s for t in mine)
        cells = []
        for base in (_PLAIN, _LOOKUP, _OWN):
            stats = None if base == name else compute_speed(timings, arm=name, baseline=base)
            ratio = stats.end_to_end_speedup if stats else None
            span = ""
            if ratio is not None and ratio.low is not None:
                span = f" ({ratio.low:.2f}-{ratio.high:.2f})"
            cells.append(f"{ratio.value:.2f}{span}" if ratio and ratio.value else "-")
        steps = [s for t in mine for s in t.generation.steps]
        is_ours = name.startswith("draftlab")
        tau = sum(s.num_emitted for s in steps) / len(steps) if is_ours and steps else None
        table.add_row(name, f"{rate:.1f}", *cells, f"{tau:.2f}" if tau else "-")
    Console().print(table)
    machine, spec, report = describe_machine(), target.spec, target.report
    versions = describe_versions()
    named_versions = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
    for line in (
        f"{len(ids)} prompts, at most {settings.eval.speed_max_new_tokens} tokens each, batch 1, "
        "greedy, prefill included, arms in turns",
        f"{spec.name} ({spec.quantisation}), {spec.dtype}, kernels {report['kernels']}",
        f"{machine['cpu']}, {machine['torch_threads']} threads, {named_versions}",
    ):
        print(line)
    return 0
