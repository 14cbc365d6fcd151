"""`draftlab report`: a run's report, written again from its files."""

from collections.abc import Sequence

from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab report RUN [suite=NAME]

Writes report.html and report.md of a run again, from what lies in eval/NAME and metrics.jsonl.
Nothing is measured. The conditions name the command that measured, and when.

  suite=NAME                   one of the run's evaluations, such as smoke or domains-2; the fullest
                               when left out

examples:
  draftlab report outputs/demo/20261129-101500-ab12
  draftlab report outputs/demo/20261129-101500-ab12 suite=smoke
"""


def run(args: Sequence[str]) -> int:
    """Write the report and say where it is."""
    things, words = split_words(args, most=1)
    suite = read_options(words, {"suite": ""})["suite"] or None
    if not things:
        raise ConfigError("which run? usage: draftlab report RUN; `draftlab runs` lists them")
    from draftlab.cli.reporting import choose_evaluation, list_evaluations, show_evaluation
    from draftlab.runs.run_dir import open_run

    opened = open_run(things[0])
    shown = choose_evaluation(opened, suite)
    page, text = show_evaluation(opened, shown)
    print(f"report {page}\n       {text}")
    # a search for the fullest has warned already
    names = list_evaluations(opened, warns=suite is not None)
    others = [name for name in names if name != shown]
    if others:
        print(f"of suite {shown}; suite=NAME shows another: {', '.join(others)}")
    return 0
