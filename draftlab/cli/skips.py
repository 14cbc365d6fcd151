"""`draftlab skips`: which of its layers a target skips best when it drafts for itself."""

import hashlib
import itertools
import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftlab.cli.disk import require_writable
from draftlab.cli.words import read_options, refuse_replaced, split_words
from draftlab.errors import CheckpointError, ConfigError
from draftlab.runs.run_dir import RunDir, create_run, open_run, write_json

if TYPE_CHECKING:
    from draftlab.cli.schema import EvalCommandSettings
    from draftlab.evaluation.skip_search import SkipMeter, SkipSearch, SkipTrial
    from draftlab.targets.target import Target

HELP = """usage: draftlab skips [target=...] [trials=40] [key=value ...]

Searches the decoder layers that drafter=self_speculative leaves out, by measured tokens a second:
decodes validation prompts with one choice of layers after another, from several starts, then one
layer more, less or exchanged at a time. Prints the best choices beside plain decoding and keeps the
best as a drafter: draftlab eval drafter=RUN.

  trials=40                    choices of layers to measure
  prompts=4 tokens=48          calibration prompts, and tokens of each answer
  drafter.num_draft_tokens=4   K
  decode=sampled seed=1        how answers are decoded; the order of the search
  resume=RUN                   go on with an interrupted search; trials= may be raised

examples:
  draftlab skips target=demo
  draftlab skips resume=outputs/skips/20261129-101500-ab12 trials=80
"""

_DEFAULTS = {"trials": "40", "prompts": "4", "tokens": "48", "resume": ""}
_REPLACED = {
    "decode.max_new_tokens": "tokens=NUMBER",
    "decode.batch_size": "prompts=NUMBER; they are decoded one at a time",
}
_SHOWN = 10
_FILE = "search.json"


def run(args: Sequence[str]) -> int:
    """Search, print the table, and keep the best choice as a drafter."""
    _, words = split_words(args, most=0)
    own = [word for word in words if word.partition("=")[0] in _DEFAULTS]
    options = read_options(own, _DEFAULTS)
    trials, num_prompts, tokens = (_count(options, key) for key in ("trials", "prompts", "tokens"))
    rest = [word for word in words if word not in own]
    if options["resume"]:  # these two are the search's own as well
        rest += [word for word in own if word.startswith(("prompts=", "tokens="))]
    refuse_replaced(rest, "skips", _REPLACED)
    settings, earlier = _choose(rest, options["resume"])
    from draftlab.cli.hardware import apply_hardware
    from draftlab.cli.measure import require_decoding, require_eval_prompts
    from draftlab.targets.load import load_target, resolve

    state = _State.read(earlier) if earlier is not None else None
    if state is not None:
        num_prompts, tokens = state.conditions["prompts"], state.conditions["tokens"]
    require_decoding(settings.decode)
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    require_writable(settings.paths.outputs if earlier is None else earlier.path)
    apply_hardware(settings.hardware)
    settings = settings.model_copy(update={"target": resolve(settings.target)})
    target = load_target(settings.target)
    prompts = _calibration_prompts(target, settings, num_prompts)
    conditions = {
        "target": target.spec.checksum,
        "prompts": num_prompts,
        "tokens": tokens,
        "prompt_ids": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }
    if state is None:
        state = _State(_new_run(settings), conditions, [])
    state.check(conditions)
    search = _search(target, settings, state, prompts, trials)
    _print(search, state.run, target.spec.num_layers)
    return 0


class _State:
    """What a search has measured so far, on disk after every trial."""

    def __init__(self, run: RunDir, conditions: dict[str, Any], trials: "list[SkipTrial]") -> None:
        self.run, self.conditions, self.trials = run, conditions, trials

    @classmethod
    def read(cls, run: RunDir) -> "_State":
        from draftlab.evaluation.skip_search import SkipTrial

        path = run.path / _FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            conditions, lines = dict(data["conditions"]), data["trials"]
            trials = [SkipTrial(tuple(t["skip_layers"]), t["tau"], t["step_s"]) for t in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"cannot go on from {path} ({type(error).__name__}: {error}); start a new search"
            ) from None
        return cls(run, conditions, trials)

    def check(self, conditions: dict[str, Any]) -> None:
        changed = [key for key, value in conditions.items() if self.conditions.get(key) != value]
        if changed:
            raise ConfigError(
                f"{self.run.path} was searched with another {' and '.join(changed)}: trials of two "
                "searches cannot be compared; start a new one"
            )

    def add(self, trial: "SkipTrial") -> None:
        self.trials.append(trial)
        data = {"conditions": self.conditions, "trials": [asdict(t) for t in self.trials]}
        write_json(self.run.path / _FILE, data)


def _count(options: dict[str, str], key: str) -> int:
    if not options[key].isdigit() or int(options[key]) < 1:
        raise ConfigError(f"{key}={options[key]}: expected a whole number from 1")
    return int(options[key])


def _choose(words: Sequence[str], resume: str) -> "tuple[EvalCommandSettings, RunDir | None]":
    """Compose a new search, or take up the settings of an interrupted one."""
    from draftlab.cli.schema import EvalCommandSettings, settings_of
    from draftlab.drafters.self_speculative import SelfSpeculativeSettings
    from draftlab.settings.base import parse_settings
    from draftlab.settings.compose import compose

    if not resume:
        composed = compose("eval", ["drafter=self_speculative", *words])
        settings, found = settings_of(EvalCommandSettings, composed), None
    elif words:
        raise ConfigError(
            f"{' '.join(words)} has no effect with resume=, which keeps the search's own settings; "
            "only trials= may change"
        )
    else:
        found = open_run(resume)
        settings = parse_settings(EvalCommandSettings, found.read_config())
    if not isinstance(settings.drafter, SelfSpeculativeSettings):
        raise ConfigError("draftlab skips searches for drafter=self_speculative; leave drafter out")
    return settings, found


def _new_run(settings: "EvalCommandSettings") -> RunDir:
    from draftlab.runs.provenance import collect_provenance

    run = create_run(settings.paths.outputs, "skips")
    run.write_config(settings.model_dump(mode="json"))
    write_json(run.provenance_path, collect_provenance(seed=settings.seed))
    return run


def _calibration_prompts(
    target: "Target", settings: "EvalCommandSettings", count: int
) -> list[list[int]]:
    """Take validation prompts, in turn from every domain."""
    from draftlab.cli.measure import load_eval_prompts

    _, validation = load_eval_prompts(
        target,
        settings.eval,
        settings.paths.cache / "data",
        template_options=settings.data.template_options,
    )
    turns = itertools.zip_longest(*validation.values())
    return [ids for turn in turns for ids in turn if ids is not None][:count]


def _search(
    target: "Target",
    settings: "EvalCommandSettings",
    state: _State,
    prompts: list[list[int]],
    trials: int,
) -> "SkipSearch":
    from draftlab.cli.progress import Ticker
    from draftlab.drafters.self_speculative import SelfSpeculativeSettings
    from draftlab.evaluation.skip_search import SkipMeter, search_skip_layers

    drafter = settings.drafter
    assert isinstance(drafter, SelfSpeculativeSettings)
    tokens = state.conditions["tokens"]
    try:
        meter = SkipMeter(target, drafter, settings.decode, prompts, max_new_tokens=tokens)
        with state.run.hold(), Ticker("choices of layers", trials) as ticker:
            ticker.update(len(state.trials))

            def note(trial: "SkipTrial") -> None:
                state.add(trial)
                ticker.advance(1, note=f"{trial.tokens_per_s:.1f} tokens/s")

            search = search_skip_layers(
                meter,
                max_trials=trials,
                seed=settings.seed,
                earlier=tuple(state.trials),
                on_trial=note,
            )
            _keep(meter, search, state.run)
    except BaseException as error:
        if not state.trials:
            shutil.rmtree(state.run.path)  # nothing that could be gone on with
        elif isinstance(error, KeyboardInterrupt):
            again = ["draftlab", "skips", f"resume={state.run.path}", f"trials={trials}"]
            raise KeyboardInterrupt(shlex.join(again)) from None
        raise
    return search


def _keep(meter: "SkipMeter", search: "SkipSearch", run: RunDir) -> None:
    from draftlab.drafters.store import save_drafter

    found = {
        "tokens_per_s": search.best.tokens_per_s,
        "plain_tokens_per_s": search.plain_tokens_per_s,
        "tau": search.best.tau,
    }
    drafter = meter.build(search.best.skip_layers)
    save_drafter(drafter, run.checkpoint_path(0), extra={"skips": found})
    run.point("best", 0)
    run.mark_finished()


def _print(search: "SkipSearch", run: RunDir, num_layers: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from draftlab.evaluation.skip_search import METHOD

    table = Table("skip_layers", f"kept of {num_layers}", "tau", "tokens/s", "over plain")
    table.add_row("none: plain decoding", "-", "1.00", f"{search.plain_tokens_per_s:.1f}", "1.00")
    for trial in search.trials[:_SHOWN]:
        table.add_row(
            ",".join(map(str, trial.skip_layers)),
            str(num_layers - len(trial.skip_layers)),
            f"{trial.tau:.2f}",
            f"{trial.tokens_per_s:.1f}",
            f"{trial.tokens_per_s / search.plain_tokens_per_s:.2f}",
        )
    Console().print(table)
    left = "" if search.is_settled else "; more trials may find better"
    print(f"{len(search.trials)} choices measured{left}. {METHOD}")
    if search.best.tokens_per_s <= search.plain_tokens_per_s:
        print("no choice beats plain decoding: self-speculation does not pay for this target here")
    chosen = ",".join(map(str, search.best.skip_layers))
    print(f"use it: drafter={run.path}")
    print(f"    or: drafter=self_speculative drafter.skip_layers=[{chosen}]")
