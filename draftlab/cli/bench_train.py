"""`draftlab bench train`: samples a second and peak memory of each family's optimizer steps.

Every family is a fresh process (`python -m draftlab.cli.bench_train JSON`), so that its peak is its
own. It does what training does - rows packed, captured hidden states read from files, the trainer's
own step - on the text of the shipped prompts, so that the target need not answer anything first.

Read first: run, then _measure.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftlab.cli.bench_out import find_out
from draftlab.cli.collect import Collected, encode_prompts
from draftlab.cli.families import Family, compose_families, known_families, share
from draftlab.cli.hardware import apply_hardware, require_threads
from draftlab.cli.progress import Ticker
from draftlab.cli.schema import RunSettings
from draftlab.cli.show_table import show_table
from draftlab.cli.train_job import find_needs, make_drafter
from draftlab.cli.words import read_options
from draftlab.data.answers import AnswerFeatures, AnswerRecord, ShardStore
from draftlab.data.packing import PackedRow, Sample, collate, cut_samples, pack
from draftlab.data.prompts import load_prompts
from draftlab.drafters.base import num_trainable
from draftlab.errors import ConfigError, DraftlabError
from draftlab.evaluation.memory import PeakMemory
from draftlab.reports import words as wording
from draftlab.reports.tables import Cell, Row, Table
from draftlab.runs.provenance import describe_machine, describe_versions
from draftlab.runs.run_dir import RunDir, write_json
from draftlab.settings.base import parse_settings
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import load_target, resolve
from draftlab.targets.target import Target
from draftlab.training.rows import TrainingRows
from draftlab.training.trainer import Trainer

_DEFAULTS = {"steps": "5", "warmup": "2", "sample_tokens": "192", "answer_tokens": "96", "out": ""}
_SHARED = ("seed", "target", "regenerate", "hardware", "paths")
_NO_EFFECT = ("data", "decode", "eval", "export", "tracker")
_READ_REGENERATE_KEYS = ("regenerate.capture_features", "regenerate.features_dtype")
_ROWS_KEPT = 2  # steps' worth of rows; further steps read them again
_WIDTH = 110  # of the table where there is no terminal


@dataclass(frozen=True, slots=True)
class TrainCase:
    """One measurement: a family's settings as plain data, and how much of what is run."""

    name: str
    settings: dict[str, Any]
    steps: int
    warmup: int
    sample_tokens: int
    answer_tokens: int


def run(words: Sequence[str]) -> int:
    """Measure family by family, print the table and write the JSON.

    Raises:
        ConfigError: words that cannot take effect.
        DraftlabError: a family that cannot be measured.
    """
    own = [word for word in words if word.startswith("bench.")]
    options = read_options(own, _DEFAULTS, group="bench.")
    counts = {key: _count(options, key) for key in _DEFAULTS if key != "out"}
    if counts["answer_tokens"] >= counts["sample_tokens"]:
        raise ConfigError(
            f"bench.answer_tokens={counts['answer_tokens']}: expected fewer than "
            f"bench.sample_tokens={counts['sample_tokens']}, of which they are a part"
        )
    rest = [word for word in words if not word.startswith("bench.")]
    _require_effect(rest)
    families, _ = share(compose_families(rest, target="tiny"), _SHARED)
    settings = families[0].settings
    if settings.hardware.num_processes > 1:
        raise ConfigError("bench train measures one process; pass hardware.num_processes=1")
    require_threads(settings.hardware)
    name = f"train-{datetime.now():%Y%m%d-%H%M%S}.json"
    out = find_out(options["out"], settings.paths.outputs / "bench" / name)
    decided = {"hardware": settings.hardware.resolved(), "target": resolve(settings.target)}
    results = []
    with Ticker("training steps", len(families)) as ticker:
        for family in families:
            plain = family.settings.model_copy(update=decided).model_dump(mode="json")
            case = TrainCase(family.name, plain, **counts)
            results.append({"family": family.name, **_in_a_process(case)})
            ticker.advance(1, note=family.name)
    lines = _conditions(families, results, counts)
    show_table(_table(results), is_dense=True, width=_WIDTH)
    print("\n".join(lines))
    sizes = {key: counts[key] for key in counts if key != "sample_tokens"}  # families have theirs
    write_json(out, {"bench": "train", "families": results, "said": lines, "sizes": sizes})
    print(f"written: {out}")
    return 0


def _require_effect(words: Sequence[str]) -> None:
    """Refuse words, of all families or of one, that change nothing here."""
    names = known_families()
    for word in words:
        key = word.partition("=")[0]
        first, _, rest = key.partition(".")
        key = rest if rest and first in names else key
        group, _, name = key.partition(".")
        is_read = group != "regenerate" or key in _READ_REGENERATE_KEYS
        if group in _NO_EFFECT or not is_read:
            raise ConfigError(
                f"{word} has no effect on bench train, which reads the shipped prompts; expected "
                "target, drafter, optim, train or hardware keys, or "
                f"{'= '.join(_READ_REGENERATE_KEYS)}="
            )
        if group == "train" and name in _replaced(1):
            raise ConfigError(
                f"{word} has no effect on bench train, which takes bench.warmup and then "
                "bench.steps steps, without probes; pass those"
            )


def _replaced(num_steps: int) -> dict[str, Any]:
    """Give the keys of `train` that are the bench's own: so many steps, told one by one."""
    limits = {"max_steps": num_steps, "max_epochs": None, "max_minutes": None, "patience": None}
    written = {"save_every_steps": num_steps, "keep_checkpoints": 1, "log_every_steps": 1}
    return limits | written | {"probe_every_steps": num_steps, "best_by": "tau"}


def _count(options: Mapping[str, str], key: str) -> int:
    text = options[key]
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"bench.{key}={text!r}: expected a number of at least 1")
    return int(text)


def _in_a_process(case: TrainCase) -> dict[str, Any]:
    words = [sys.executable, "-m", "draftlab.cli.bench_train", json.dumps(asdict(case))]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DraftlabError(
            f"measuring {case.name} failed: {last[0]}; with too little memory choose fewer "
            "train.batch_rows or train.row_tokens, or train.gradient_checkpointing=true"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _measure(case: TrainCase) -> dict[str, Any]:
    """Run one case in this process."""
    settings = parse_settings(RunSettings, case.settings)
    apply_hardware(settings.hardware)
    target = load_target(settings.target)
    needs = find_needs(settings, target)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        collected = _make_samples(case, settings, target, needs, ShardStore(folder / "answers"))
        drafter = make_drafter(RunDir(folder), settings, target, collected)
        cut = cut_samples(collected.samples, settings.train.row_tokens).samples
        rows = TrainingRows(pack(cut, settings.train.row_tokens), captured=collected.captured)
        limits = _replaced(case.warmup + case.steps)
        memory = PeakMemory(target.device)
        memory.restart()
        at_rest, peak = memory.read(), None
        measured: list[dict[str, float]] = []

        def take(step: int, split: str, **numbers: float) -> None:
            nonlocal peak
            if step > case.warmup:
                measured.append(numbers)
                peak = memory.read()  # before the checkpoint, which training writes seldom
            elif step == case.warmup:
                memory.restart()

        Trainer(
            drafter,
            target,
            rows,
            optim=settings.optim,
            train=settings.train.model_copy(update=limits),
            seed=settings.seed,
            folder=folder / "checkpoints",
            metrics=take,
        ).run()
    seconds = [numbers["time/step_s"] for numbers in measured]
    samples = sum(n["train/sequences_per_s"] * n["time/step_s"] for n in measured)
    tokens = sum(n["train/tokens_per_s"] * n["time/step_s"] for n in measured)
    return {
        "num_parameters": num_trainable(drafter),
        "sample_tokens": max(map(len, collected.samples)),
        "samples_per_s": samples / sum(seconds),
        "tokens_per_s": tokens / sum(seconds),
        "step_s": median(seconds),
        "at_rest_bytes": at_rest,
        "peak_bytes": peak,
        "dtype": target.spec.dtype,
        "kernels": target.report["kernels"],
        "target": target.spec.name,
        "device": str(target.device),
    }


def _make_samples(
    case: TrainCase,
    settings: RunSettings,
    target: Target,
    needs: FeatureRequest,
    store: ShardStore,
) -> Collected:
    """Cut the shipped prompts into samples, and let the target read each where states are kept."""
    size = min(case.sample_tokens, settings.train.row_tokens, target.spec.max_positions)
    if size <= case.answer_tokens:
        raise ConfigError(
            f"bench.answer_tokens={case.answer_tokens} leaves nothing before them in samples of "
            f"{size} tokens, which rows and target allow; pass fewer"
        )
    train = settings.train
    rows = _ROWS_KEPT * train.batch_rows * train.accumulation
    number = rows * (train.row_tokens // size)
    prompts = encode_prompts(target, load_prompts("train"))
    text = [token for ids in zip(*prompts.values(), strict=False) for p in ids for token in p]
    text *= -(-number * size // len(text))
    pieces = [text[i * size : (i + 1) * size] for i in range(number)]
    records = [
        AnswerRecord(
            prompt_id=str(i),
            domain="bench",
            messages=(),
            prompt_ids=tuple(piece[: -case.answer_tokens]),
            answer_ids=tuple(piece[-case.answer_tokens :]),
            finish="length",
            sample_index=0,
        )
        for i, piece in enumerate(pieces)
    ]
    captures = settings.regenerate.capture_features
    features = None
    if captures and (needs.tap_layers or needs.wants_final):
        features = []
        for i, piece in enumerate(pieces):
            ids = torch.tensor(piece)
            row = PackedRow((Sample(i, "bench", ids, torch.ones_like(ids, dtype=torch.bool)),))
            with torch.no_grad():
                seen = target.read_features(collate([row], size).to(target.device), needs)
            parts = [None if part is None else part[0] for part in (seen.taps, seen.final)]
            features.append(AnswerFeatures(*parts))
    store.write(0, records, features, features_dtype=settings.regenerate.features_dtype)
    return Collected(store.read(), needs if captures else None, {}, {})


def _table(results: Sequence[Mapping[str, Any]]) -> Table:
    def megabytes(size: int | None) -> Cell:
        return Cell(wording.NOTHING if size is None else f"{size / 1e6:,.0f}")

    rows = [
        Row(
            (
                Cell(found["family"]),
                Cell(f"{found['num_parameters'] / 1e6:.2f} M"),
                Cell(f"{found['samples_per_s']:.1f}"),
                Cell(f"{found['tokens_per_s']:,.0f}"),
                Cell(f"{found['step_s']:.3f}"),
                megabytes(found["peak_bytes"]),
                megabytes(found["at_rest_bytes"]),
            )
        )
        for found in results
    ]
    columns = (
        "family",
        "trained\nparameters",
        "samples/s",
        "tokens/s",
        "s a step,\nmedian",
        "peak MB",
        "before the\nfirst step, MB",
    )
    return Table("Training steps", columns, tuple(rows))


def _conditions(
    families: Sequence[Family], results: Sequence[Mapping[str, Any]], counts: Mapping[str, int]
) -> list[str]:
    settings = families[0].settings
    machine, versions = describe_machine(), describe_versions()
    ways: dict[str, list[str]] = {}
    for family, found in zip(families, results, strict=True):
        train = family.settings.train
        rows = f"{train.batch_rows}" + (f" x {train.accumulation}" * (train.accumulation > 1))
        precision = "float32" if train.precision == "no" else train.precision
        way = f"{rows} rows of {train.row_tokens} tokens in samples of {found['sample_tokens']}"
        way += f", {precision}"
        way += ", layers computed again" if train.gradient_checkpointing else ""
        ways.setdefault(f"{way}, {family.settings.optim.kind}", []).append(family.name)
    said = [f"{way}: {', '.join(names)}" if len(ways) > 1 else way for way, names in ways.items()]
    is_kept = settings.regenerate.capture_features
    dtype = settings.regenerate.features_dtype
    states = f"read from files ({dtype})" if is_kept else "computed by the target in every step"
    found = results[0]
    on = found["device"]
    threads = settings.hardware.resolved().threads or 1
    return [
        f"{wording.plural(counts['steps'], 'step')} after {counts['warmup']} to warm up; a step: "
        + "; ".join(said),
        f"the last {counts['answer_tokens']} tokens of a sample are learned; the target's hidden "
        f"states {states}",
        "peak: "
        + (
            "highest resident memory of a process of its own while it steps"
            if on == "cpu"
            else "torch's peak of allocated memory on the device while it steps"
        )
        + ", target included",
        f"{found['target']}, {found['dtype']}, kernels {found['kernels']}, on {on}",
        f"{machine['cpu'] if on == 'cpu' else ', '.join(g['name'] for g in machine['gpus'])}, "
        f"{wording.plural(threads, 'thread')}, torch {versions['torch']}",
    ]


def main(argv: Sequence[str]) -> int:
    """Measure the case that the parent process describes."""
    try:
        print(json.dumps(_measure(TrainCase(**json.loads(argv[0])))))
    except DraftlabError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
