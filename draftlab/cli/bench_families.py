"""`draftlab bench families`: every family trained on the same answers for the same minutes.

The target answers the training prompts once. All families read those answers and the hidden states
captured with them: what they need differs, so the union is captured in that one pass. Computing
the states anew in every step instead would cost each family a target pass over every row, half or
more of a small drafter's step on a processor, in the very minutes that are compared.

Read first: run, then FamiliesBench.finish.
"""

import hashlib
import json
import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from draftlab.cli.collect import Collected, collect_samples
from draftlab.cli.drafters import open_drafter
from draftlab.cli.estimate import Estimate, require_disk
from draftlab.cli.eval import REPLACED
from draftlab.cli.families import Family, common_words, compose_families, known_families, share
from draftlab.cli.hardware import apply_hardware
from draftlab.cli.launch import require_inputs
from draftlab.cli.measure import measure_drafters, require_eval_prompts
from draftlab.cli.probe_table import list_probes
from draftlab.cli.reporting import training_facts, write_report
from draftlab.cli.show_table import show_table
from draftlab.cli.train_job import find_needs, train_drafter
from draftlab.cli.words import refuse_replaced, take_minutes
from draftlab.errors import ConfigError, DraftlabError
from draftlab.evaluation.conditions import describe_law
from draftlab.evaluation.results import EvalResult, merge, read_result
from draftlab.evaluation.settings import EvalSettings
from draftlab.files import write_atomic
from draftlab.reports import html
from draftlab.reports.facts import ReportInput
from draftlab.reports.families import FamilyResult, ProbePoint, family_data, family_tables
from draftlab.reports.markdown import render_table
from draftlab.reports.words import plural
from draftlab.runs.metrics_log import read_metrics
from draftlab.runs.provenance import collect_provenance
from draftlab.runs.run_dir import RunDir, create_run, list_runs, write_json
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import load_target, resolve
from draftlab.targets.spec import name_with_quantisation
from draftlab.targets.target import Target

log = logging.getLogger(__name__)

_NAME = "bench-families"
_SHARED = ("seed", "target", "data", "regenerate", "decode", "eval", "hardware", "paths")
_EVAL = "eval"
_WIDTH = 132  # of the table where there is no terminal
_BEYOND_TRAINING = 1.2  # of the training minutes, for probes, before any family is done
_LEAST_MINUTES = 0.01
_EVALUATION_S = 100.0  # the same, for an evaluation


def run(words: Sequence[str]) -> int:
    """Run what is left of the bench and print the tables.

    Raises:
        DraftlabError: words that do not fit, or a family that failed; the others are done then.
    """
    for word in words:
        key, _, value = word.partition("=")
        if key.endswith("train.max_minutes"):
            raise ConfigError(f"{word}: all families train equally long; pass minutes={value}")
    refuse_replaced(words, "bench families", REPLACED, groups=known_families())
    minutes, is_fresh, words = take_minutes(
        words, default=5.0, least=_LEAST_MINUTES, expected="training minutes a family, 0.01 to 1440"
    )
    families = compose_families(
        words, presets=["train.max_epochs=null", f"train.max_minutes={minutes:g}", "eval=brief"]
    )
    families, said = share(families, _SHARED)
    for line in said:
        print(line)
    first = families[0].settings
    if first.hardware.num_processes > 1:
        raise ConfigError(
            f"hardware.num_processes={first.hardware.num_processes}: families are compared in one "
            "process; pass hardware.num_processes=1"
        )
    require_eval_prompts(first.eval, first.paths.cache / "data")
    estimate = require_inputs(first)
    bench = _open(families, minutes, is_fresh, words)
    with bench.run.hold():
        bench.finish(estimate)
    return 0


def _open(
    families: list[Family], minutes: float, is_fresh: bool, words: Sequence[str]
) -> "FamiliesBench":
    """Find the newest bench of equal words, whichever families it had, or begin one."""
    first = families[0].settings
    plain = first.model_dump(mode="json")
    common = {group: plain[group] for group in _SHARED if group != _EVAL}
    # how long families are evaluated is no part of a training: it can be had anew for less
    typed = sorted(word for word in common_words(words) if not word.startswith(_EVAL))
    asked = json.dumps([minutes, typed, common], sort_keys=True)
    digest = hashlib.sha256(asked.encode()).hexdigest()
    found = None
    for old in [] if is_fresh else reversed(list_runs(first.paths.outputs / _NAME)):
        if _read_json(old.provenance_path).get("settings_sha256") == digest and not old.is_running:
            print(f"going on with {old.path}")
            found = old
            break
    # what the machine decides is decided once: threads, device, dtype
    apply_hardware(first.hardware)
    if found is None:
        found = create_run(first.paths.outputs, _NAME)
        provenance = collect_provenance(seed=first.seed)
        write_json(found.provenance_path, {**provenance, "settings_sha256": digest})
        decided = {"hardware": first.hardware.resolved(), "target": resolve(first.target)}
        found.write_config(
            {"minutes": minutes, **common}
            | {group: value.model_dump(mode="json") for group, value in decided.items()}
        )
    saved = found.read_config()
    decided = {
        group: type(getattr(first, group)).model_validate(saved[group])
        for group in ("hardware", "target")
    }
    apply_hardware(decided["hardware"])
    decided_families = [
        replace(family, settings=family.settings.model_copy(update=decided)) for family in families
    ]
    return FamiliesBench(found, decided_families, minutes)


class FamiliesBench:
    """The families of one bench. What is done stands in RUN/stages.json, by family and settings."""

    def __init__(self, run: RunDir, families: Sequence[Family], minutes: float) -> None:
        """Open a bench's run; nothing heavy happens yet."""
        self.run = run
        self._families = families
        self._minutes = minutes
        self._stages_path: Path = run.path / "stages.json"
        self._stages: dict[str, Any] = _read_json(self._stages_path)

    def finish(self, estimate: Estimate) -> None:
        """Run every stage of every family that is not done, and write the tables after each.

        Args:
            estimate: of the first family, whose data all share.

        Raises:
            ConfigError: a target that cannot decode drafts, or a disk too small for what is kept.
            DraftlabError: families that failed, once all others are done.
        """
        print(f"run {self.run.path}")
        left = [family for family in self._families if not self._is_done(family)]
        failed = {}
        if left:
            (self.run.path / "finished").unlink(missing_ok=True)
            target = load_target(self._families[0].settings.target)
            if target.speculation_refusal is not None:
                raise ConfigError(f"no drafts can be measured: {target.speculation_refusal}")
            collected = self._collect(target, estimate)
            for number, family in enumerate(left, start=1):
                told = f"family {number} of {len(left)}: {family.name}; {self._eta(number, left)}"
                print(told, flush=True)
                try:
                    self._do(family, target, collected)
                except Exception as error:  # hours of other families are not lost for one
                    failed[family.name] = error
                    if not isinstance(error, DraftlabError):
                        traceback.print_exc()
                    print(f"{family.name} failed: {error}", flush=True)
                else:
                    self._write_tables(show=number < len(left))
        self._write_tables(show=True)
        if failed:
            said = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise DraftlabError(
                f"{len(failed)} of {len(self._families)} families failed ({said}); the others are "
                f"in {self.run.path}; the same command tries again what failed"
            )
        self.run.mark_finished()

    def _collect(self, target: Target, estimate: Estimate) -> Collected:
        first = self._families[0].settings
        each = [find_needs(family.settings, target) for family in self._families]
        needs = reduce(FeatureRequest.union, each)
        if estimate.disk_bytes and "answers" not in self._stages:
            # a state of the final layer takes as many bytes as one of a tap
            disk = estimate.disk_bytes * _num_states(needs) // max(1, _num_states(each[0]))
            require_disk(replace(estimate, disk_bytes=disk), first.paths.outputs)
        collected = collect_samples(
            target, first.data, first.regenerate, first.paths, needs=needs, seed=first.seed
        )
        self._mark("answers", collected.facts)
        return collected

    def _do(self, family: Family, target: Target, collected: Collected) -> None:
        """Train and evaluate one family; a training that was killed goes on where it stopped."""
        run, settings, done = self._run_of(family), family.settings, self._stage(family)
        if not run.config_path.is_file():
            run.path.mkdir(parents=True, exist_ok=True)
            write_json(run.provenance_path, collect_provenance(seed=settings.seed))
            run.write_config(settings.model_dump(mode="json"))
        began = time.monotonic()
        if "train_s" not in done:
            result = train_drafter(run, settings, target, collected)
            told = {"steps": result.total_steps, "tau": result.best_tau}
            done = self._mark(family.key, {**told, "train_s": _since(began)})
            began = time.monotonic()
        found = measure_drafters(
            target,
            {family.name: open_drafter(str(run.path), target)},
            settings.eval,
            settings.decode,
            template_options=settings.data.template_options,
            folder=run.eval_path(settings.eval.suite),
            cache=settings.paths.cache / "data",
        )
        write_report(run, found)
        run.mark_finished()
        evaluated = {"evaluated": _digest(settings.eval), "evaluation_s": _since(began)}
        self._mark(family.key, {**done, **evaluated})

    def _write_tables(self, *, show: bool) -> None:
        """Write table.md, table.json and report.html of the families that are done."""
        done = [family for family in self._families if self._is_done(family)]
        if not done:
            return
        merged: EvalResult | None = None
        results, training = [], []
        for family in done:
            run = self._run_of(family)
            found = read_result(run.eval_path(family.settings.eval.suite) / "summary.json")
            merged = found if merged is None else merge(merged, found)
            metrics = read_metrics(run.metrics_path)
            facts = training_facts(run, metrics, found)
            training += facts
            points = (
                ProbePoint(p.step, p.loss, p.tau, p.tokens_per_s) for p in list_probes(metrics)
            )
            arm, of_run = found.arms[0], facts[0] if facts else None
            results.append(FamilyResult(family.name, arm, of_run, tuple(points)))
        assert merged is not None
        pending = [family.name for family in self._families if family not in done]
        lines = self._conditions(merged, pending)
        tables = family_tables(results)
        text = "\n\n".join([*(render_table(table) for table in tables), "## Conditions"])
        listed = "\n".join(f"- {line}" for line in lines)
        write_atomic(self.run.path / "table.md", f"{text}\n\n{listed}\n")
        data = {
            "bench": "families",
            "families": [family_data(result) for result in results],
            "pending": pending,
            "answers": self._stages.get("answers"),
            "said": lines,
            "conditions": merged.conditions.comparable,
        }
        write_json(self.run.path / "table.json", data)
        given = ReportInput(merged, training, run=self.run.path.name, pending=pending)
        html.write_report(self.run.path, given)
        if show:
            for table in tables:
                show_table(table, is_dense=True, width=_WIDTH)
            print("\n".join(lines))
            print(f"tables {self.run.path / 'table.md'}")
            print(f"report {self.run.report_html_path}", flush=True)

    def _conditions(self, result: EvalResult, pending: list[str]) -> list[str]:
        """Say what the figures depend on."""
        same, details = result.conditions.comparable, result.conditions.details
        versions = details.get("versions", {})
        device = same["cpu"] if same["device"] == "cpu" else ", ".join(same["gpus"])
        timed = plural(same["speed_prompts_per_domain"], "prompt")
        lines = [
            f"{name_with_quantisation(same['target'], same['quantisation'])}, {same['dtype']}, "
            f"kernels {same['kernels']}",
            f"{device}, {plural(same['threads'], 'thread')}, torch {versions.get('torch')}, "
            f"transformers {versions.get('transformers')}",
            _describe_answers(self._stages.get("answers", {})),
            f"training: at most {self._minutes:g} minutes of optimizer steps a family; "
            + "; ".join(self._describe_training()),
            f"evaluation: {sum(same['domains'].values())} prompts of {len(same['domains'])} "
            f"domains, at most {same['max_new_tokens']} tokens, {same['batch_size']} at once; "
            f"speed at batch 1 on {timed} a domain, at most {same['speed_max_new_tokens']} tokens; "
            + describe_law(self._families[0].settings.decode),
        ]
        return [*lines, *([f"still to come: {', '.join(pending)}"] if pending else [])]

    def _describe_training(self) -> list[str]:
        """Say how rows and optimiser were set, each way once with the families it holds for."""
        ways: dict[str, list[str]] = {}
        for family in self._families:
            train, optim = family.settings.train, family.settings.optim
            precision = "float32" if train.precision == "no" else train.precision
            way = (
                f"{train.batch_rows * train.accumulation} rows of {train.row_tokens} tokens a "
                f"step, {precision}, {optim.kind} at {optim.lr:g}, {optim.schedule}"
            )
            ways.setdefault(way, []).append(family.name)
        if len(ways) == 1:
            return list(ways)
        return [f"{', '.join(names)}: {way}" for way, names in ways.items()]

    def _eta(self, number: int, left: Sequence[Family]) -> str:
        """Estimate what is left by what the families that are done took."""

        def usual(key: str, guess: float) -> float:
            known = [stage[key] for stage in self._stages.values() if key in stage]
            return sum(known) / len(known) if known else guess

        rest = left[number - 1 :]
        num_untrained = sum("train_s" not in self._stage(family) for family in rest)
        seconds = num_untrained * usual("train_s", 60 * self._minutes * _BEYOND_TRAINING)
        seconds += len(rest) * usual("evaluation_s", _EVALUATION_S)
        return f"about {seconds / 60:.0f} minutes left" if seconds >= 90 else "a minute or so left"

    def _run_of(self, family: Family) -> RunDir:
        return RunDir(self.run.path / "families" / family.key)

    def _stage(self, family: Family) -> dict[str, Any]:
        return self._stages.get(family.key, {})

    def _is_done(self, family: Family) -> bool:
        return self._stage(family).get("evaluated") == _digest(family.settings.eval)

    def _mark(self, stage: str, facts: dict[str, Any]) -> dict[str, Any]:
        self._stages[stage] = facts
        write_json(self._stages_path, self._stages)
        return facts


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def _digest(settings: EvalSettings) -> str:
    return hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]


def _num_states(needs: FeatureRequest) -> int:
    return len(needs.tap_layers) + needs.wants_final


def _describe_answers(facts: dict[str, Any]) -> str:
    if facts.get("answers") != "target":
        return "training data: conversations with the answers as given, the same for all"
    return (
        f"training data, the same for all: {facts['num_answers']:,} answers of the target to "
        f"{facts['num_prompts']:,} prompts, {facts['num_answer_tokens']:,} answer tokens"
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
