"""`draftlab eval`: acceptance, speed and losslessness by domain."""

import itertools
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from draftlab.cli.disk import require_writable
from draftlab.cli.words import refuse_replaced, split_words
from draftlab.errors import LosslessViolation
from draftlab.settings.compose import compose

if TYPE_CHECKING:
    from draftlab.drafters.base import Drafter

HELP = """usage: draftlab eval drafter=DRAFTER [target=...] [eval=domains] [key=value ...]

Decodes evaluation prompts with every drafter and without one, in the same engine: acceptance in
batches on all prompts, speed at batch 1 with the arms interleaved, and an audit of the timed
answers. Ends with exit code 3 when the audit finds a defect.

Writes eval/SUITE with provenance.json (this command, versions, machine), summary.json,
generations.jsonl, steps.jsonl, report.html and report.md into the run of the first drafter that
belongs to one, else into a run of its own; also into one of its own with another target than the
run's. Nothing is overwritten: where SUITE is there, it is SUITE-2.
The run's report is that of its fullest evaluation; draftlab report RUN suite=NAME shows another.

  drafter=DRAFTER              ngram, a run, a drafter folder or a hub id
  drafters=[ngram,RUN]         several, compared in one report
  target=... hardware=...      a run's own when left out
  eval=domains|brief|smoke     eval.prompts=my.jsonl, eval.draft_lengths=[2,4]
  decode=greedy|sampled        decode.num_draft_tokens=4 fixes K instead of choosing it
  paths.outputs=FOLDER         a run of its own there, when the drafter's run lies elsewhere

examples:
  draftlab eval drafter=ngram target=demo eval=smoke
  draftlab eval drafters=[ngram,outputs/demo/20261129-101500-ab12]
"""

# decode.* that a suite has its own of
REPLACED = {
    "decode.max_new_tokens": "eval.max_new_tokens, or eval.speed_max_new_tokens for timed answers",
    "decode.batch_size": "eval.batch_size; answers are timed one at a time",
}


def run(args: Sequence[str]) -> int:
    """Measure, write the report, and say the verdict."""
    _, words = split_words(args, most=0)
    refuse_replaced(words, "eval", REPLACED)
    compose("eval", words)  # a misspelt word is told before torch is loaded
    from draftlab.cli.drafters import compose_for_drafters, open_drafter
    from draftlab.cli.hardware import apply_hardware, place_drafters
    from draftlab.cli.keeping import find_home, free_suite, own_run
    from draftlab.cli.measure import measure_drafters, require_decoding, require_eval_prompts
    from draftlab.cli.reporting import write_report
    from draftlab.cli.schema import EvalCommandSettings, settings_of
    from draftlab.reports.words import verdict
    from draftlab.targets.load import load_target, resolve

    settings = settings_of(EvalCommandSettings, compose_for_drafters("eval", words))
    require_decoding(settings.decode)
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    apply_hardware(settings.hardware, places_drafters=True)
    settings = settings.model_copy(update={"target": resolve(settings.target)})
    names = list(settings.drafters) if settings.drafters else [settings.drafter]
    home = find_home(names, settings, words)
    require_writable(home.path if home else settings.paths.outputs)
    # two evaluations of one run at once would disturb each other's clocks
    with home.hold() if home else nullcontext():
        target = load_target(settings.target)
        place_drafters(target, settings.hardware)
        drafters: dict[str, Drafter] = {}
        for name in names:
            drafter = open_drafter(name, target)
            drafters[_free_label(drafter, name, drafters)] = drafter
        with nullcontext(home) if home else own_run(settings, "eval") as owner:
            suite = free_suite(owner, settings.eval.suite)
            if suite != settings.eval.suite:
                there = owner.eval_path(settings.eval.suite)
                print(f"{there} stays as it is: this evaluation is {suite}")
            result = measure_drafters(
                target,
                drafters,
                settings.eval.model_copy(update={"suite": suite}),
                settings.decode,
                template_options=settings.data.template_options,
                folder=owner.eval_path(suite),
                cache=settings.paths.cache / "data",
            )
            page, text = write_report(owner, result)
    told = verdict(result)
    print(told.headline)
    print(f"report {page}\n       {text}")
    if result.num_defects:
        raise LosslessViolation(
            f"the audit found {result.num_defects} defects: tokens the target would not have "
            f"produced; they stand in {page}"
        )
    lossy = [arm.name for arm in result.arms if arm.is_lossy]
    if lossy:
        print(f"LOSSY: {', '.join(lossy)}: answers do not have the target's law")
    return 0


def _free_label(drafter: "Drafter", name: Any, taken: Collection[str]) -> str:
    """Give a drafter a name of its own in tables: its kind, else its folder's, else a number."""
    from draftlab.cli.drafters import drafter_label

    label = drafter_label(name)
    numbered = (f"{label} {i}" for i in itertools.count(2))
    every = itertools.chain((drafter.kind, label), numbered)
    return next(one for one in every if one not in taken)
