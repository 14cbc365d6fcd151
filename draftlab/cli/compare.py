"""`draftlab compare`: two evaluations of the same prompts, side by side."""

from collections.abc import Sequence

from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab compare RUN RUN [suite=SUITE]

Pairs the prompts of two evaluations and prints, for each figure, both values with their 95 %
intervals, the change with its interval, and whether that says anything. The first run is the
reference. Refused, naming what differs, when the two were measured under other conditions. Nothing
is measured.

  suite=SUITE                  such as domains; the newest evaluation of each run when left out

examples:
  draftlab compare outputs/eval/20261129-101500-ab12 outputs/eval/20261129-104500-cd34
  draftlab compare RUN RUN suite=domains
"""


def run(args: Sequence[str]) -> int:
    """Print the paired table."""
    things, words = split_words(args, most=2)
    suite = read_options(words, {"suite": ""})["suite"] or None
    if len(things) != 2:
        raise ConfigError(
            f"expected two runs, got {len(things)}; usage: draftlab compare RUN RUN; "
            "`draftlab runs` lists them"
        )
    from draftlab.cli.reporting import find_evaluation
    from draftlab.cli.show_table import show_table
    from draftlab.reports.compare import compare
    from draftlab.runs.run_dir import open_run

    runs = [open_run(thing) for thing in things]
    names = (runs[0].path.name, runs[1].path.name)
    if names[0] == names[1]:
        names = (str(runs[0].path), str(runs[1].path))
    first, second = (find_evaluation(found, suite) for found in runs)
    show_table(compare(first, second, names))
    return 0
