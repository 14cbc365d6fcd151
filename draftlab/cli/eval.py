"""`draftlab eval`: acceptance, speed and losslessness by domain."""

from collections.abc import Sequence
from pathlib import Path

from draftlab.cli.words import split_words

HELP = """usage: draftlab eval drafter=DRAFTER [target=...] [eval=domains] [key=value ...]

Decodes evaluation prompts with every drafter and without one, in the same engine: acceptance in
batches on all prompts, speed at batch 1 with the arms interleaved, and an audit of the timed
answers. Writes summary.json, generations.jsonl, steps.jsonl, report.html and report.md. Ends with
exit code 3 when the audit finds a defect.

  drafter=DRAFTER              ngram, a run, a drafter folder or a hub id
  drafters=[ngram,RUN]         several, compared in one report
  target=...                   a run's own target when left out
  eval=domains|smoke           eval.prompts=my.jsonl, eval.draft_lengths=[2,4]
  decode=greedy|sampled        decode.num_draft_tokens=4 fixes K instead of choosing it

examples:
  draftlab eval drafter=ngram target=demo eval=smoke
  draftlab eval drafters=[ngram,outputs/demo/20261129-101500-ab12]
"""


def run(args: Sequence[str]) -> int:
    """Measure, write the report, and say the verdict."""
    _, words = split_words(args, most=0)
    from draftlab.cli.drafters import drafter_label, load_named_drafter
    from draftlab.cli.measure import measure_drafters
    from draftlab.cli.reporting import write_report
    from draftlab.cli.schema import EvalCommandSettings, settings_of
    from draftlab.errors import LosslessViolation
    from draftlab.reports.words import verdict
    from draftlab.runs.provenance import collect_provenance
    from draftlab.runs.run_dir import RunDir, create_run, write_json
    from draftlab.settings.compose import compose
    from draftlab.targets.load import load_target, resolve

    words = with_target_of_run(words)
    settings = settings_of(EvalCommandSettings, compose("eval", words))
    settings = settings.model_copy(update={"target": resolve(settings.target)})
    names = list(settings.drafters) if settings.drafters else [settings.drafter]
    target = load_target(settings.target)
    drafters = {}
    for name in names:
        drafter = load_named_drafter(name, target)
        label = drafter.kind if drafter.kind not in drafters else drafter_label(name)
        drafters[label] = drafter
    owner = _owning_run(names)
    if owner is None:
        owner = create_run(settings.paths.outputs, "eval")
        owner.write_config(settings.model_dump(mode="json"))
        write_json(owner.provenance_path, collect_provenance(seed=settings.seed))
    assert isinstance(owner, RunDir)
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
    return 0


def with_target_of_run(words: list[str]) -> list[str]:
    """Take the target of the first named run when no word names a target."""
    import yaml

    if any(word.startswith(("target=", "target.", "recipe=")) for word in words):
        return words
    for word in words:
        key, _, value = word.partition("=")
        if key not in ("drafter", "drafters", "init"):
            continue
        for name in value.strip("[]").split(","):
            for folder in (
                Path(name.strip()).expanduser(),
                *Path(name.strip()).expanduser().parents[:2],
            ):
                config = folder / "config.yaml"
                if config.is_file():
                    saved = yaml.safe_load(config.read_text(encoding="utf-8")).get("target", {})
                    given = [
                        f"target.{key}={value}" for key, value in saved.items() if value is not None
                    ]
                    return [f"target={saved['source']}", *given, *words]
    return words


def _owning_run(names: Sequence[object]) -> object:
    """The run whose drafter is measured; its report is written there."""
    from draftlab.runs.run_dir import RunDir

    for name in names:
        if isinstance(name, str) and (Path(name).expanduser() / "config.yaml").is_file():
            return RunDir(Path(name).expanduser())
    return None
