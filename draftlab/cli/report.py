"""`draftlab report`: a run's report, written again from its files."""

from collections.abc import Sequence

from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab report RUN

Writes report.html and report.md of a run again, from eval/*/summary.json and metrics.jsonl.
Nothing is measured.

examples:
  draftlab report outputs/demo/20261129-101500-ab12
"""


def run(args: Sequence[str]) -> int:
    """Write the report and say where it is."""
    things, words = split_words(args, most=1)
    read_options(words, {})
    if not things:
        raise ConfigError("which run? usage: draftlab report RUN; `draftlab runs` lists them")
    from draftlab.cli.reporting import find_evaluation, write_report
    from draftlab.runs.run_dir import open_run

    opened = open_run(things[0])
    page, text = write_report(opened, find_evaluation(opened).result)
    print(f"report {page}\n       {text}")
    return 0
