"""`draftlab runs`: what is under outputs/."""

from pathlib import Path

from draftlab.cli.words import read_options, split_words
from draftlab.runs.metrics_log import read_metrics
from draftlab.runs.run_dir import RunDir, list_runs

HELP = """
usage: draftlab runs [paths.outputs=FOLDER]

Lists every run, oldest first: state, last step, and whether it has a report. A run's folder is
what `resume=`, `drafter=`, `draftlab report` and `draftlab compare` take.

states: done | running | stopped (before its end: train, demo, skips and bench families go on with
the same command, train and skips also with resume=RUN)

example:
  draftlab runs paths.outputs=/data/runs
"""


def run(args: list[str]) -> int:
    """List the runs."""
    _, words = split_words(args, most=0)
    outputs = Path(read_options(words, {"paths.outputs": "outputs"})["paths.outputs"]).expanduser()
    runs = list_runs(outputs)
    if not runs:
        print(f"no runs in {outputs}; start one: draftlab train")
        return 0
    rows = [("run", "state", "step", "report"), *(_row(found) for found in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _row(found: RunDir) -> tuple[str, str, str, str]:
    state = "done" if found.is_finished else "running" if found.is_running else "stopped"
    rows = read_metrics(found.metrics_path)
    step = str(rows[-1]["step"]) if rows else "-"
    report = found.report_html_path.name if found.report_html_path.is_file() else "-"
    return str(found.path), state, step, report
