"""A run's report, from what lies in its folder: evaluation, metrics, provenance."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from draftlab.errors import CheckpointError
from draftlab.evaluation.files import Evaluation, read_eval
from draftlab.evaluation.results import EvalResult, read_result
from draftlab.reports import html
from draftlab.reports.facts import ReportInput, TrainingFacts
from draftlab.reports.samples import pick_samples
from draftlab.runs.metrics_log import read_metrics
from draftlab.runs.run_dir import PROVENANCE, RunDir

log = logging.getLogger(__name__)


def write_report(
    run: RunDir, result: EvalResult, *, pending: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Write the report of an evaluation that was just made, and the run's own.

    Every evaluation has its report in its folder. The run's is that of the fullest evaluation, so
    that a short one made later does not take its place.

    Args:
        run: the run's folder.
        result: the evaluation, of as many stages as are done; it stands in the run's folder.
        pending: drafters still to be measured.

    Returns:
        Paths of this evaluation's page and text: the run's own where they are its.
    """
    fullest = list_evaluations(run)[0]
    if fullest == result.suite:
        return show_evaluation(run, fullest, pending=pending)
    pages = html.write_report(run.eval_path(result.suite), _gather(run, result.suite, pending))
    try:
        show_evaluation(run, fullest)
    except CheckpointError as error:
        # what was just measured, a defect above all, is still to be told
        log.warning("the report of %s stays as it is: %s", run.path, error)
    return pages


def show_evaluation(run: RunDir, suite: str, *, pending: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Let the run's report be that of one evaluation, which has it in its own folder as well.

    Args:
        run: the run's folder.
        suite: name of the evaluation.
        pending: drafters still to be measured.

    Returns:
        Paths of the run's page and text.
    """
    given = _gather(run, suite, pending)
    return html.write_report(run.path, given, also=(run.eval_path(suite),))


def list_evaluations(run: RunDir, *, warns: bool = True) -> list[str]:
    """List a run's evaluations by name, the fullest first, of equal ones the newest.

    Args:
        run: the run's folder.
        warns: say which cannot be read (old or damaged ones); they are left out either way.

    Raises:
        CheckpointError: there is none that can be read.
    """
    found = sorted(run.path.glob("eval/*/summary.json"))
    if not found:
        raise CheckpointError(
            f"run {run.path} was never evaluated; draftlab eval drafter={run.path} does that"
        )
    ranked: list[tuple[tuple[int, int, float], str]] = []
    troubles: list[CheckpointError] = []
    for path in found:
        try:
            result = read_result(path)
            fullness = _most_tokens(path, result), len(result.arms), path.stat().st_mtime
            ranked.append((fullness, path.parent.name))
        except CheckpointError as error:
            troubles.append(error)
    if not ranked:
        raise troubles[0]
    if warns:
        for error in troubles:
            log.warning("left out: %s", error)
    return [name for _, name in sorted(ranked, reverse=True)]


def find_evaluation(run: RunDir, suite: str | None = None) -> Evaluation:
    """Read an evaluation of a run: by its name, or the fullest.

    Raises:
        CheckpointError: there is none.
    """
    return read_eval(run.eval_path(choose_evaluation(run, suite)))


def choose_evaluation(run: RunDir, suite: str | None) -> str:
    """Give the name of an evaluation that is there: the one asked for, or the fullest.

    Raises:
        CheckpointError: there is none, or the one asked for cannot be read.
    """
    if suite is None:
        return list_evaluations(run)[0]
    summary = run.eval_path(suite) / "summary.json"
    if summary.is_file():
        read_result(summary)
        return suite
    names = list_evaluations(run)
    raise CheckpointError(
        f"run {run.path} has no evaluation of suite {suite!r}; it has {', '.join(names)}"
    )


def training_facts(
    run: RunDir, metrics: list[dict[str, Any]], result: EvalResult
) -> tuple[TrainingFacts, ...]:
    """Read how the run's drafter was trained, an entry for each of its checkpoints evaluated.

    Where an evaluation does not say which that were, one entry without the step. Nothing when there
    is no checkpoint yet, or none that can be read.
    """
    steps = [row for row in metrics if row["split"] == "train"]
    card = _read_card(run) if steps else None
    if card is None:
        return ()
    measured = [
        (arm.name, _step_of(run, Path(arm.folder))) for arm in result.arms if arm.folder is not None
    ]
    own = [(name, step) for name, step in measured if step is not None]
    data = card["extra"].get("data", {})
    return tuple(
        TrainingFacts(
            drafter=name,
            num_steps=max(row["step"] for row in steps),
            minutes=_training_minutes(steps),
            num_tokens=data.get("num_answer_tokens") or data.get("data", {}).get("num_learned", 0),
            num_conversations=data.get("num_answers") or data.get("data", {}).get("num_samples", 0),
            data=_describe_data(data),
            measured_step=step,
        )
        for name, step in own or [(card["kind"], None)]
    )


def _read_card(run: RunDir) -> dict[str, Any] | None:
    """Read what the newest checkpoint says of the training's data, which all of a run share."""
    try:
        folder = run.pointed("best") or run.pointed("latest")
        if folder is None:
            return None
        # read as it is: what would check it needs torch, and a report is written without
        card = json.loads((folder / "drafter.json").read_text(encoding="utf-8"))
        return {"kind": card["kind"], "extra": card["extra"]}
    except (CheckpointError, OSError, ValueError, KeyError, TypeError) as error:
        # what was measured is still to be reported
        log.warning("nothing is said of the training of %s: %s", run.path, error)
        return None


def _step_of(run: RunDir, folder: Path) -> int | None:
    """Give the step of a checkpoint of this run, wherever the run lay then; None for others."""
    name, step = folder.parent.parent.name, re.fullmatch(r"step-(\d+)", folder.name)
    is_own = folder.parent.name == "checkpoints" and name == run.path.resolve().name
    return int(step[1]) if step and is_own else None


def _gather(run: RunDir, suite: str, pending: tuple[str, ...]) -> ReportInput:
    evaluation = read_eval(run.eval_path(suite))
    metrics = read_metrics(run.metrics_path)
    return ReportInput(
        result=evaluation.result,
        training=training_facts(run, metrics, evaluation.result),
        metrics=metrics,
        samples=pick_samples(evaluation),
        run=run.path.name,
        pending=pending,
        others=[name for name in list_evaluations(run, warns=False) if name != suite],
        provenance=_read_provenance(run.eval_path(suite)),
    )


def _read_provenance(folder: Path) -> dict[str, Any]:
    """Read which command made an evaluation; nothing of one from before that was written down."""
    path = folder / PROVENANCE
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; delete it to do without") from None


def _most_tokens(path: Path, result: EvalResult) -> int:
    """Count the tokens that an arm could give at most, in batches and timed."""
    same = result.conditions.comparable
    try:
        timed = sum(min(n, same["speed_prompts_per_domain"]) for n in same["domains"].values())
        batched = sum(same["domains"].values())
        return batched * same["max_new_tokens"] + timed * same["speed_max_new_tokens"]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"cannot read evaluation {path}: its conditions lack what every evaluation has "
            f"({type(error).__name__}: {error}); evaluate again"
        ) from None


def _training_minutes(steps: list[dict[str, Any]]) -> float:
    """Minutes of optimizer steps: a logged row holds the mean of the steps since the one before."""
    rows = sorted(steps, key=lambda row: row["step"])
    starts = [0, *(row["step"] for row in rows[:-1])]
    timed = [
        (row["step"] - start, row["time/step_s"])
        for start, row in zip(starts, rows, strict=True)
        if row.get("time/step_s")
    ]
    if not timed:
        return steps[-1]["time_s"] / 60
    mean = sum(num * seconds for num, seconds in timed) / sum(num for num, _ in timed)
    return rows[-1]["step"] * mean / 60


def _describe_data(data: dict[str, Any]) -> str:
    if data.get("answers") == "target":
        return f"{data['num_prompts']} prompts, answered by the target itself"
    return "conversations with the answers as given"
