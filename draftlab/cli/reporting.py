"""A run's report, from what lies in its folder: evaluation, metrics, provenance."""

from pathlib import Path
from typing import Any

from draftlab.errors import CheckpointError
from draftlab.evaluation.results import EvalResult, read_result
from draftlab.reports import html
from draftlab.reports.facts import ReportInput, TrainingFacts
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
        training=_training_facts(run, metrics),
        metrics=metrics,
        run=run.path.name,
        pending=pending,
    )
    return html.write_report(run.path, given)


def find_result(run: RunDir) -> EvalResult:
    """Read the newest evaluation of a run.

    Raises:
        CheckpointError: it was never evaluated.
    """
    found = sorted(run.path.glob("eval/*/summary.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise CheckpointError(
            f"run {run.path} was never evaluated; draftlab eval drafter={run.path} does that"
        )
    return read_result(found[-1])


def _training_facts(run: RunDir, metrics: list[dict[str, Any]]) -> tuple[TrainingFacts, ...]:
    """Read how the run's drafter was trained; nothing when there is no checkpoint yet."""
    from draftlab.drafters.store import read_card

    folder = run.pointed("best") or run.pointed("latest")
    steps = [row for row in metrics if row["split"] == "train"]
    if folder is None or not steps:
        return ()
    card = read_card(folder)
    data = card.extra.get("data", {})
    return (
        TrainingFacts(
            drafter=card.settings.kind,
            num_steps=max(row["step"] for row in steps),
            minutes=_training_minutes(steps),
            num_tokens=data.get("num_answer_tokens") or data.get("data", {}).get("num_learned", 0),
            num_conversations=data.get("num_answers") or data.get("data", {}).get("num_samples", 0),
            data=_describe_data(data),
            best_step=int(folder.name.rpartition("-")[2]),
        ),
    )


def _training_minutes(steps: list[dict[str, Any]]) -> float:
    return sum(row.get("time/step_s", 0.0) for row in steps) / 60 or steps[-1]["time_s"] / 60


def _describe_data(data: dict[str, Any]) -> str:
    if data.get("answers") == "target":
        return f"{data['num_prompts']} prompts, answered by the target itself"
    return "conversations with the answers as given"
