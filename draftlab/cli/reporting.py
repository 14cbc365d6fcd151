"""A run's report, from what lies in its folder: evaluation, metrics, provenance."""

import json
from pathlib import Path
from typing import Any

from draftlab.errors import CheckpointError
from draftlab.evaluation.files import Evaluation, read_eval
from draftlab.evaluation.results import EvalResult
from draftlab.reports import html
from draftlab.reports.facts import ReportInput, TrainingFacts
from draftlab.reports.samples import pick_samples
from draftlab.runs.metrics_log import read_metrics
from draftlab.runs.run_dir import RunDir


def write_report(
    run: RunDir, result: EvalResult, *, pending: tuple[str, ...] = ()
) -> tuple[Path, Path]:
    """Write report.html and report.md of a run.

    Args:
        run: the run's folder.
        result: its evaluation, of as many stages as are done.
        pending: drafters still to be measured.

    Returns:
        Paths of the page and of the text.
    """
    metrics = read_metrics(run.metrics_path)
    given = ReportInput(
        result=result,
        training=training_facts(run, metrics),
        metrics=metrics,
        samples=pick_samples(read_eval(run.eval_path(result.suite))),
        run=run.path.name,
        pending=pending,
    )
    return html.write_report(run.path, given)


def find_evaluation(run: RunDir, suite: str | None = None) -> Evaluation:
    """Read an evaluation of a run: of a suite, or the newest.

    Raises:
        CheckpointError: there is none.
    """
    found = sorted(run.path.glob("eval/*/summary.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise CheckpointError(
            f"run {run.path} was never evaluated; draftlab eval drafter={run.path} does that"
        )
    if suite is None:
        return read_eval(found[-1].parent)
    folders = {path.parent.name: path.parent for path in found}
    if suite not in folders:
        raise CheckpointError(
            f"run {run.path} has no evaluation of suite {suite!r}; it has {', '.join(folders)}"
        )
    return read_eval(folders[suite])


def training_facts(run: RunDir, metrics: list[dict[str, Any]]) -> tuple[TrainingFacts, ...]:
    """Read how the run's drafter was trained; nothing when there is no checkpoint yet."""
    folder = run.pointed("best") or run.pointed("latest")
    steps = [row for row in metrics if row["split"] == "train"]
    if folder is None or not steps:
        return ()
    # read as it is: what would check it needs torch, and a report is written without
    card = json.loads((folder / "drafter.json").read_text(encoding="utf-8"))
    data = card["extra"].get("data", {})
    return (
        TrainingFacts(
            drafter=card["kind"],
            num_steps=max(row["step"] for row in steps),
            minutes=_training_minutes(steps),
            num_tokens=data.get("num_answer_tokens") or data.get("data", {}).get("num_learned", 0),
            num_conversations=data.get("num_answers") or data.get("data", {}).get("num_samples", 0),
            data=_describe_data(data),
            best_step=int(folder.name.rpartition("-")[2]),
        ),
    )


def _training_minutes(steps: list[dict[str, Any]]) -> float:
    """Minutes of optimizer steps: a logged row holds the mean of the steps since the one before."""
    timed = [row["time/step_s"] for row in steps if row.get("time/step_s")]
    last = max(row["step"] for row in steps)
    return last * sum(timed) / len(timed) / 60 if timed else steps[-1]["time_s"] / 60


def _describe_data(data: dict[str, Any]) -> str:
    if data.get("answers") == "target":
        return f"{data['num_prompts']} prompts, answered by the target itself"
    return "conversations with the answers as given"
