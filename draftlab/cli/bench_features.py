"""`draftlab bench features`: what training on shortened hidden states costs in acceptance length.

One set of answers, captured once in the target's dtype, is laid out again in every way asked for;
the same drafter is trained on each for equally many steps and decodes the same evaluation prompts.
So nothing differs between two arms but the bits of the features. Read `run`, then `_judge`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from draftlab.cli.bench_out import find_out
from draftlab.cli.words import read_options, refuse_replaced
from draftlab.errors import ConfigError

if TYPE_CHECKING:
    from draftlab.cli.collect import Collected
    from draftlab.cli.schema import RunSettings
    from draftlab.data.feature_bytes import FeatureDtype
    from draftlab.data.packing import Sample
    from draftlab.decoding.records import Generation
    from draftlab.evaluation.results import Estimate
    from draftlab.runs.run_dir import RunDir
    from draftlab.targets.target import Target

_DEFAULTS = {"dtypes": "bf16,fp8", "out": ""}
_REPLACED = {
    "decode.max_new_tokens": "eval.max_new_tokens",
    "decode.batch_size": "eval.batch_size",
}
_FAMILY = "bench-features"
WITHIN, OUTSIDE, UNDECIDED = 0, 3, 4  # exit codes: done, a gate missed, a gate that cannot decide


@dataclass(frozen=True, slots=True)
class Arm:
    """What one way of keeping features led to.

    Attributes:
        dtype: as in regenerate.features_dtype.
        run: folder of the training.
        feature_bytes: of the feature files, all together.
        steps: optimizer steps trained.
        tau: acceptance length, pooled over prompts.
        num_accepted: draft tokens that the target kept.
        ratio: tau over the first arm's, prompts paired; None for the first arm.
        is_within: tau lies in the first arm's interval; None where that has none, and where neither
            arm had a draft token accepted, which says nothing of features.
    """

    dtype: str
    run: str
    feature_bytes: int
    steps: int
    tau: "Estimate"
    num_accepted: int
    ratio: "Estimate | None"
    is_within: bool | None


def run(words: Sequence[str]) -> int:
    """Train and decode every arm, print the table and write the JSON.

    Raises:
        ConfigError: words that cannot take effect.
    """
    own = [word for word in words if word.startswith("bench.")]
    rest = [word for word in words if not word.startswith("bench.")]
    options = read_options(own, _DEFAULTS, group="bench.")
    refuse_replaced(rest, "bench features", _REPLACED)
    dtypes = _read_dtypes(options["dtypes"])
    settings = _compose(rest)
    folder = settings.paths.outputs / "bench" / f"features-{datetime.now():%Y%m%d-%H%M%S}"
    out = find_out(options["out"], folder.with_suffix(".json"))
    arms = _measure(settings, dtypes, folder)
    for line in _table(arms):
        print(line)
    _write(out, arms, settings)
    print(f"written: {out}")
    return _judge(arms)


def lay_out_again(
    samples: "Sequence[Sample]", folder: Path, dtype: "FeatureDtype"
) -> "list[Sample]":
    """Write captured features once more in another dtype; give the samples that read them there.

    Args:
        samples: with captured features.
        folder: where the files go, one for each that the samples have now.
        dtype: target, bf16 or fp8.

    Raises:
        ConfigError: a sample has no captured features.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    from draftlab.data.feature_bytes import lay_out_vectors, take_vectors
    from draftlab.files import write_whole

    paths = {sample.features_path for sample in samples}
    places: dict[Path, Path] = {}
    for path in sorted(path for path in paths if path is not None):
        with safe_open(path, framework="pt") as file:
            offsets = file.get_tensor("offsets")
            laid = {"offsets": offsets}
            for name in ("taps", "final"):
                vectors = take_vectors(name, 0, int(offsets[-1]), file)
                if vectors is not None:
                    laid |= lay_out_vectors(name, vectors, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        places[path] = folder / path.name
        write_whole(places[path], lambda part, laid=laid: save_file(laid, part))
    if None in paths:
        raise ConfigError("bench features compares captured features, and these samples have none")
    return [replace(s, features_path=places[s.features_path]) for s in samples if s.features_path]


def _read_dtypes(text: str) -> "list[FeatureDtype]":
    """Read A,B or [A,B], as lists are typed everywhere."""
    from draftlab.data.feature_bytes import FeatureDtype

    known = get_args(FeatureDtype)
    items = [item.strip() for item in text.strip("[]").split(",") if item.strip()]
    dtypes: list[Any] = items
    problem = None
    if odd := [item for item in items if item not in known]:
        problem = f"there is no {odd[0]!r}"
    elif twice := [item for item in items if items.count(item) > 1]:
        problem = f"{twice[0]} stands there twice"
    elif len(items) < 2:
        problem = "it takes two to compare"
    if problem is not None:
        raise ConfigError(
            f"bench.dtypes={text}: {problem}; expected two or more of {', '.join(known)}, the one "
            "to compare with first, such as bf16,fp8"
        )
    return dtypes


def _compose(words: Sequence[str]) -> "RunSettings":
    """Compose and check what the arms have in common."""
    from draftlab.cli.estimate import require_training
    from draftlab.cli.hardware import apply_hardware
    from draftlab.cli.launch import compose_run, require_inputs
    from draftlab.cli.measure import require_eval_prompts
    from draftlab.targets.load import resolve

    settings, _ = compose_run(words)
    regenerate, hardware = settings.regenerate, settings.hardware
    for is_wrong, what in (
        (regenerate.features_dtype != "target", "regenerate.features_dtype is what it compares"),
        (not regenerate.capture_features, "regenerate.capture_features=false keeps no features"),
        (settings.data.answers != "target", f"data.answers={settings.data.answers} keeps none"),
        (hardware.num_processes != 1, "it runs in one process; pass hardware.num_processes=1"),
        (
            settings.train.max_minutes is not None,
            f"train.max_minutes={settings.train.max_minutes} lets an arm's schedule follow the "
            "machine's pace; pass train.max_minutes=null train.max_steps=N",
        ),
        (
            settings.train.patience is not None,
            f"train.patience={settings.train.patience} may end one arm before the other; "
            "pass train.patience=null",
        ),
    ):
        if is_wrong:
            raise ConfigError(
                f"bench features: {what}; expected answers of the target with captured features, "
                "and as many steps for all of bench.dtypes=A,B"
            )
    require_training(require_inputs(settings), settings.drafter.kind)
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    apply_hardware(hardware)
    update = {"hardware": hardware.resolved(), "target": resolve(settings.target)}
    return settings.model_copy(update=update)


def _measure(settings: "RunSettings", dtypes: "Sequence[FeatureDtype]", folder: Path) -> list[Arm]:
    from draftlab.cli.collect import collect_samples
    from draftlab.cli.measure import load_eval_prompts
    from draftlab.cli.train_job import find_needs
    from draftlab.targets.load import load_target

    target = load_target(settings.target)
    needs = find_needs(settings, target)
    collected = collect_samples(
        target, settings.data, settings.regenerate, settings.paths, needs=needs, seed=settings.seed
    )
    by_domain, _ = load_eval_prompts(
        target,
        settings.eval,
        settings.paths.cache / "data",
        template_options=settings.data.template_options,
    )
    prompts = [ids for p in by_domain.values() for ids in p[: settings.eval.prompts_per_domain]]
    arms: list[Arm] = []
    first: list[Generation] = []
    for dtype in dtypes:
        samples = lay_out_again(collected.samples, folder / dtype, dtype)
        run, steps = _train(settings, target, replace(collected, samples=samples), dtype)
        answers = _decode(settings, target, run, prompts)
        first = first or answers
        arms.append(_arm(settings, dtype, run, steps, folder / dtype, answers, first, arms))
    return arms


def _train(
    settings: "RunSettings", target: "Target", collected: "Collected", dtype: str
) -> "tuple[RunDir, int]":
    """Train one arm; the settings fix how many steps."""
    from draftlab.cli.train_job import train_drafter
    from draftlab.runs.provenance import collect_provenance
    from draftlab.runs.run_dir import create_run, write_json

    regenerate = settings.regenerate.model_copy(update={"features_dtype": dtype})
    settings = settings.model_copy(update={"regenerate": regenerate})
    run = create_run(settings.paths.outputs, _FAMILY)
    write_json(run.provenance_path, collect_provenance(seed=settings.seed))
    run.write_config(settings.model_dump(mode="json"))
    with run.hold():
        result = train_drafter(run, settings, target, collected)
        run.mark_finished()
    return run, result.total_steps


def _decode(
    settings: "RunSettings", target: "Target", run: "RunDir", prompts: Sequence[Sequence[int]]
) -> "list[Generation]":
    """Decode with the last weights: the best of some probes would add their luck."""
    from draftlab.cli.drafters import open_drafter
    from draftlab.decoding.decoder import Decoder

    drafter = open_drafter(str(run.pointed("latest")), target)
    return Decoder(target, drafter, settings.decode).generate(
        prompts,
        max_new_tokens=settings.eval.max_new_tokens,
        batch_size=settings.eval.batch_size,
    )


def _arm(
    settings: "RunSettings",
    dtype: str,
    run: "RunDir",
    steps: int,
    folder: Path,
    answers: "Sequence[Generation]",
    first: "Sequence[Generation]",
    arms: Sequence[Arm],
) -> Arm:
    from draftlab.evaluation.acceptance import compute_acceptance
    from draftlab.evaluation.intervals import paired_estimate

    found = compute_acceptance(answers, seed=settings.eval.seed)
    tau = found.tau
    ratio, is_within = None, None
    if arms:
        # a prompt whose answer ended with its first token has no step in either arm
        pairs = [(a, b) for a, b in zip(answers, first, strict=True) if a.steps and b.steps]
        here, steps_here = _counts([pair[0] for pair in pairs])
        there, steps_there = _counts([pair[1] for pair in pairs])
        ratio = paired_estimate([here, steps_there], [steps_here, there])
        bar = arms[0].tau
        has_drafts = found.num_accepted > 0 or arms[0].num_accepted > 0
        if has_drafts and tau.value is not None and bar.low is not None and bar.high is not None:
            is_within = bar.low <= tau.value <= bar.high
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Arm(dtype, str(run.path), size, steps, tau, found.num_accepted, ratio, is_within)


def _counts(answers: "Sequence[Generation]") -> tuple[list[int], list[int]]:
    """Count what each answer's verify steps emitted, and the steps."""
    emitted = [sum(step.num_emitted for step in answer.steps) for answer in answers]
    return emitted, [len(answer.steps) for answer in answers]


def _judge(arms: Sequence[Arm]) -> int:
    """Give the exit code: whether every arm's tau lies in the interval of the first one's."""
    found = [arm.is_within for arm in arms[1:]]
    if False in found:
        return OUTSIDE
    return UNDECIDED if None in found else WITHIN


def _table(arms: Sequence[Arm]) -> list[str]:
    first = arms[0]
    lines = [f"{'features':<9}{'bytes':>15}{'share':>8}{'steps':>8}  tau with interval"]
    for arm in arms:
        share = f"{arm.feature_bytes / first.feature_bytes:.1%}"
        ratio = "" if arm.ratio is None else f"  ratio {_told(arm.ratio)}  {_said(arm, first)}"
        lines.append(
            f"{arm.dtype:<9}{arm.feature_bytes:>15,}{share:>8}{arm.steps:>8}  "
            f"{_told(arm.tau)}{ratio}"
        )
    lines.append(
        f"95 % intervals over {first.tau.num_prompts} prompts; ratios paired by prompt; same "
        "answers, seed and optimizer steps in every arm"
    )
    if any(_has_no_drafts(arm, first) for arm in arms[1:]):
        lines.append(
            "UNDECIDED: no draft token was accepted, so tau says nothing of the features; train "
            "longer, such as with train.max_steps=N"
        )
    return lines


def _said(arm: Arm, first: Arm) -> str:
    if arm.is_within is None:
        return "UNDECIDED: no drafts accepted" if _has_no_drafts(arm, first) else "no interval"
    return f"{'within' if arm.is_within else 'OUTSIDE'} {first.dtype}'s"


def _has_no_drafts(arm: Arm, first: Arm) -> bool:
    return arm.num_accepted == 0 and first.num_accepted == 0


def _told(estimate: "Estimate") -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _write(out: Path, arms: Sequence[Arm], settings: "RunSettings") -> None:
    from draftlab.files import write_atomic

    record: dict[str, Any] = {
        "bench": "features",
        "arms": [asdict(arm) for arm in arms],
        "settings": settings.model_dump(mode="json"),
    }
    write_atomic(out, json.dumps(record, indent=1) + "\n")
