"""`draftlab eval`: acceptance, speed and losslessness by domain."""

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from draftlab.cli.words import split_words

if TYPE_CHECKING:
    from draftlab.drafters.base import Drafter

HELP = """usage: draftlab eval drafter=DRAFTER [target=...] [eval=domains] [key=value ...]

Decodes evaluation prompts with every drafter and without one, in the same engine: acceptance in
batches on all prompts, speed at batch 1 with the arms interleaved, and an audit of the timed
answers. Writes summary.json, generations.jsonl, steps.jsonl, report.html and report.md. Ends with
exit code 3 when the audit finds a defect.

  drafter=DRAFTER              ngram, a run, a drafter folder or a hub id
  drafters=[ngram,RUN]         several, compared in one report
  target=... hardware=...      a run's own when left out
  eval=domains|brief|smoke     eval.prompts=my.jsonl, eval.draft_lengths=[2,4]
  decode=greedy|sampled        decode.num_draft_tokens=4 fixes K instead of choosing it

examples:
  draftlab eval drafter=ngram target=demo eval=smoke
  draftlab eval drafters=[ngram,outputs/demo/20261129-101500-ab12]
"""


def run(args: Sequence[str]) -> int:
    """Measure, write the report, and say the verdict."""
    _, words = split_words(args, most=0)
    from draftlab.cli.drafters import compose_for_drafters, find_owning_run, open_drafter
    from draftlab.cli.hardware import apply_hardware, place_drafters
    from draftlab.cli.measure import measure_drafters, require_eval_prompts
    from draftlab.cli.reporting import write_report
    from draftlab.cli.schema import EvalCommandSettings, settings_of
    from draftlab.errors import LosslessViolation
    from draftlab.reports.words import verdict
    from draftlab.runs.provenance import collect_provenance
    from draftlab.runs.run_dir import create_run, write_json
    from draftlab.targets.load import load_target, resolve

    settings = settings_of(EvalCommandSettings, compose_for_drafters("eval", words))
    require_eval_prompts(settings.eval, settings.paths.cache / "data")
    apply_hardware(settings.hardware, places_drafters=True)
    settings = settings.model_copy(update={"target": resolve(settings.target)})
    names = list(settings.drafters) if settings.drafters else [settings.drafter]
    target = load_target(settings.target)
    place_drafters(target, settings.hardware)
    drafters: dict[str, Drafter] = {}
    for name in names:
        drafter = open_drafter(name, target)
        drafters[_free_label(drafter, name, drafters)] = drafter
    runs = [run for name in names if isinstance(name, str) and (run := find_owning_run(name))]
    if runs:
        owner = runs[0]  # its drafter is measured: the report belongs there
    else:
        owner = create_run(settings.paths.outputs, "eval")
        owner.write_config(settings.model_dump(mode="json"))
        write_json(owner.provenance_path, collect_provenance(seed=settings.seed))
    result = measure_drafters(
        target,
        drafters,
        settings.eval,
        settings.decode,
        folder=owner.eval_path(settings.eval.suite),
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
