"""`draftlab demo`: the whole loop on a small real model, within the minutes given."""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftlab.cli.disk import require_writable
from draftlab.cli.words import split_words, take_minutes
from draftlab.errors import ConfigError

log = logging.getLogger(__name__)

HELP = """usage: draftlab demo [minutes=12] [key=value ...]

Trains an EAGLE-3 head for SmolLM2-135M-Instruct (Q4_1, dequantised), decodes losslessly with it and
with n-gram drafting, and writes report.html. Probes the machine, plans the stages to fit, and
reports after each. The same command after Ctrl-C goes on; after it is done it says where the report
is.

  minutes=45                   a better head
  fresh=true                   start anew, though an equal demo is done
  recipe=..., optim.lr=...     any word of draftlab train but those that the plan decides

examples:
  draftlab demo
  draftlab demo minutes=45 drafter.draft_vocab_size=16384
"""

_RECIPE = "eagle3/smollm2-demo"
_NAME = "demo"


def run(args: Sequence[str]) -> int:
    """Run what is left of the demo and say where the report is."""
    _, words = split_words(args, most=0)
    minutes, is_fresh, words = take_minutes(
        words, default=12.0, least=1.0, expected="a number of minutes from 1 to 1440"
    )
    if not any(word.startswith("recipe=") for word in words):
        words = [f"recipe={_RECIPE}", *words]
    _require_unplanned(words)
    began = time.monotonic()
    demo, is_finished = _open(minutes, is_fresh, words, began)
    if not is_finished:
        with demo.run.hold():
            demo.finish()
    demo.say_where()
    return 0


def _require_unplanned(words: Sequence[str]) -> None:
    """Refuse words that would be overwritten or have no effect.

    Raises:
        ConfigError: naming the word and what to pass.
    """
    from draftlab.cli.plan import PLANNED_KEYS

    for word in words:
        key = word.partition("=")[0]
        if key in PLANNED_KEYS:
            raise ConfigError(
                f"{word}: the demo decides {key} by the time it has; pass minutes=NUMBER, or give "
                "this word to draftlab train"
            )
        if key == "resume":
            raise ConfigError(
                f"{word}: equal words go on with a demo that was stopped; pass fresh=true to start "
                "anew"
            )


def _open(minutes: float, is_fresh: bool, words: list[str], began: float) -> tuple["Demo", bool]:
    """Find the newest demo of equal words, or begin one."""
    from draftlab.cli.hardware import apply_hardware
    from draftlab.cli.schema import RunSettings, settings_of
    from draftlab.runs.provenance import collect_provenance
    from draftlab.runs.run_dir import create_run, list_runs, write_json
    from draftlab.runs.trackers import require_tracker
    from draftlab.settings.compose import compose
    from draftlab.targets.load import resolve

    settings = settings_of(RunSettings, compose("train", words))
    if settings.hardware.num_processes > 1:
        raise ConfigError(
            f"hardware.num_processes={settings.hardware.num_processes}: the demo runs in one "
            "process; pass hardware.num_processes=1, or train with draftlab train"
        )
    require_writable(settings.paths.outputs)
    require_tracker(settings.tracker)
    apply_hardware(settings.hardware)
    asked = json.dumps([minutes, settings.model_dump(mode="json")], sort_keys=True)
    digest = hashlib.sha256(asked.encode()).hexdigest()
    if not is_fresh:
        for found in reversed(list_runs(settings.paths.outputs / _NAME)):
            saved = _read_json(found.provenance_path)
            if saved.get("settings_sha256") == digest and not found.is_running:
                print(f"going on with {found.path}" if not found.is_finished else "done already")
                return Demo(found, began), found.is_finished
    settings = settings.model_copy(
        update={
            "target": resolve(settings.target),
            "hardware": settings.hardware.resolved(),
        }
    )
    run_dir = create_run(settings.paths.outputs, _NAME)
    provenance = collect_provenance(seed=settings.seed)
    write_json(
        run_dir.provenance_path, {**provenance, "settings_sha256": digest, "minutes": minutes}
    )
    run_dir.write_config(settings.model_dump(mode="json"))
    return Demo(run_dir, began), False


class Demo:
    """The stages of one demo. What is decided or done stands in RUN/stages.json."""

    def __init__(self, run: Any, began: float) -> None:
        """Open a demo's run; nothing heavy happens yet."""
        self.run = run
        self._began = began
        self._stages_path: Path = run.path / "stages.json"
        self.stages: dict[str, Any] = _read_json(self._stages_path)

    def finish(self) -> None:
        """Run every stage that is not done."""
        from draftlab.cli.worker import read_run_settings
        from draftlab.targets.load import load_target

        settings = read_run_settings(self.run)
        self.total_s = 60 * float(_read_json(self.run.provenance_path)["minutes"])
        print(f"run {self.run.path}")
        self.target = load_target(settings.target)
        spec, kernels = self.target.spec, self.target.report["kernels"]
        print(f"target {spec.name}, {spec.dtype}, kernels {kernels}")
        self.settings = self._plan(settings)
        self._measure_ngram()
        collected = self._collect()
        self._train(collected)
        self._measure_trained()
        self.run.mark_finished()

    def say_where(self) -> None:
        """Print the verdict and the report's place."""
        from draftlab.cli.reporting import find_evaluation
        from draftlab.reports.words import verdict

        told = verdict(find_evaluation(self.run).result)
        print("\n".join([told.headline, *told.lines]))
        print(f"report {self.run.report_html_path}\n       {self.run.report_md_path}")

    def _plan(self, settings: Any) -> Any:
        """Probe the machine once and let the settings fit the time; later runs keep that plan."""
        from draftlab.cli.plan import apply_to_eval, plan_stages

        if "plan" in self.stages:
            return settings
        num_prompts = self._count_prompts(settings)
        rates = self._probe(settings)
        plan = plan_stages(self.total_s, time.monotonic() - self._began, rates, num_prompts)
        print(plan.describe())
        sampled = {"temperature": 0.7, "top_p": 0.95} if plan.answers_per_prompt > 1 else {}
        regenerate = settings.regenerate.model_copy(
            update={
                "answers_per_prompt": plan.answers_per_prompt,
                "max_new_tokens": plan.answer_tokens,
                "prompts_per_shard": plan.prompts_per_shard,
                **sampled,
            }
        )
        train = settings.train.model_copy(update={"max_minutes": round(plan.train_s / 60, 2)})
        settings = settings.model_copy(
            update={
                "eval": apply_to_eval(plan, settings.eval),
                "regenerate": regenerate,
                "train": train,
            }
        )
        self.run.write_config(settings.model_dump(mode="json"))
        self._mark("plan", {**asdict(plan), "rates": asdict(rates)})
        return settings

    def _count_prompts(self, settings: Any) -> int:
        """Count the chats that the target will answer: none where their answers are given."""
        from draftlab.data.loader import read_training_chats
        from draftlab.data.unasked import explain_unasked

        cache = settings.paths.cache / "data"
        chats = read_training_chats(settings.data, cache, lambda: self.target.tokenizer)
        if settings.data.answers == "given":
            return 0
        return sum(explain_unasked(chat) is None for chat in chats.conversations)

    def _probe(self, settings: Any) -> Any:
        """Measure plain decoding at the three batch sizes that the stages use."""
        from draftlab.cli.collect import encode_prompts
        from draftlab.cli.plan import Rates
        from draftlab.data.prompts import load_prompts
        from draftlab.decoding.decoder import Decoder

        prompts = encode_prompts(self.target, load_prompts("train")[:48])
        ids = [p for some in zip(*prompts.values(), strict=False) for p in some]
        decoder = Decoder(self.target, None, settings.decode)
        decoder.generate(ids[:2], max_new_tokens=4)  # first calls allocate and are slow

        def rate(batch: int, tokens: int) -> float:
            began = time.monotonic()
            done = decoder.generate(ids[:batch], max_new_tokens=tokens, batch_size=batch)
            return sum(len(d.output_ids) for d in done) / (time.monotonic() - began)

        batch = min(len(ids), settings.regenerate.batch_size)
        decoder.generate(ids[:batch], max_new_tokens=2, batch_size=batch)
        return Rates(
            single=rate(1, 64),
            batched=rate(min(len(ids), settings.eval.batch_size), 32),
            answering=rate(batch, 48),
        )

    def _measure_ngram(self) -> None:
        if "ngram" in self.stages:
            return
        began = time.monotonic()
        self._measure("ngram", "ngram", pending=(self.settings.drafter.kind,))
        self._mark("ngram", {"seconds": round(time.monotonic() - began, 1)})
        print(f"first report: {self.run.report_html_path}")

    def _collect(self) -> Any:
        """Let the target answer until its time is up; what was written by then is used."""
        from draftlab.cli.collect import collect_samples
        from draftlab.cli.plan import ANSWERING_SHARE
        from draftlab.cli.train_job import find_needs

        began = time.monotonic()
        left = self._seconds_left()
        allowed = self.stages["plan"]["answer_s"] if left is None else ANSWERING_SHARE * left
        is_done = "answers" in self.stages
        collected = collect_samples(
            self.target,
            self.settings.data,
            self.settings.regenerate,
            self.settings.paths,
            needs=find_needs(self.settings, self.target),
            seed=self.settings.seed,
            answer_s=allowed,
            may_answer=not is_done,
        )
        if not is_done:
            self._mark(
                "answers", {"seconds": round(time.monotonic() - began, 1), **collected.facts}
            )
        return collected

    def _train(self, collected: Any) -> None:
        from draftlab.cli.train_job import train_drafter

        if "train" in self.stages:
            return
        if "train_minutes" not in self.stages:
            self._mark("train_minutes", self._minutes_left_for_training())
        train = self.settings.train.model_copy(update={"max_minutes": self.stages["train_minutes"]})
        result = train_drafter(self.run, self.settings, self.target, collected, train=train)
        self._mark("train", {"steps": result.total_steps, "tau": result.best_tau})

    def _minutes_left_for_training(self) -> float:
        plan, left = self.stages["plan"], self._seconds_left()
        left = plan["train_s"] if left is None else left
        if left < plan["train_s"] / 2:
            log.info("this machine is slower than planned: training gets %.0f s", max(20.0, left))
        return round(max(20.0, left) / 60, 2)

    def _seconds_left(self) -> float | None:
        """Correct the plan by what the first report took; the last one is still to come.

        None where the run was resumed: earlier stages were not part of this process's time.
        """
        plan, spent = self.stages["plan"], time.monotonic() - self._began
        if spent < plan["spent_s"] + self.stages["ngram"]["seconds"]:
            return None
        slowness = max(0.4, self.stages["ngram"]["seconds"] / plan["eval_s"])
        return max(20.0, 0.95 * self.total_s - spent - slowness * plan["eval_s"])

    def _measure_trained(self) -> None:
        if "final" in self.stages:
            return
        kind = self.settings.drafter.kind
        self._measure(kind, str(self.run.path), pending=())
        self._mark("final", {"seconds_in_all": round(time.monotonic() - self._began, 1)})

    def _measure(self, label: str, name: str, *, pending: tuple[str, ...]) -> None:
        from draftlab.cli.drafters import open_drafter
        from draftlab.cli.measure import measure_drafters
        from draftlab.cli.reporting import write_report
        from draftlab.evaluation.results import read_result

        folder = self.run.eval_path(self.settings.eval.suite)
        summary = folder / "summary.json"
        earlier = read_result(summary) if "ngram" in self.stages and summary.is_file() else None
        result = measure_drafters(
            self.target,
            {label: open_drafter(name, self.target)},
            self.settings.eval,
            self.settings.decode,
            template_options=self.settings.data.template_options,
            folder=folder,
            cache=self.settings.paths.cache / "data",
            earlier=earlier,
        )
        write_report(self.run, result, pending=pending)

    def _mark(self, stage: str, facts: Any) -> None:
        from draftlab.runs.run_dir import write_json

        self.stages[stage] = facts
        write_json(self._stages_path, self.stages)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
