"""`draftlab compare`: two evaluations of the same prompts, side by side."""

from collections.abc import Sequence

from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError

HELP = """usage: draftlab compare RUN RUN [suite=SUITE[,SUITE]]

Pairs the prompts of two evaluations and prints, for each figure, both values with their 95 %
intervals, the change with its interval, and whether that says anything. The first run is the
reference. Refused, naming what differs, when the two were measured under other conditions. Nothing
is measured.

  suite=SUITE                  such as domains; the fullest evaluation of each run when left out
  suite=SUITE,SUITE            of either run its own; the two may be one: suite=domains,domains-2

examples:
  draftlab compare outputs/eval/20261129-101500-ab12 outputs/eval/20261129-104500-cd34
  draftlab compare RUN RUN suite=domains
"""


def run(args: Sequence[str]) -> int:
    """Print the paired table."""
    things, words = split_words(args, most=2)
    typed = read_options(words, {"suite": ""})["suite"]
    suites = typed.split(",") if typed else [None]
    if len(suites) > 2:
        raise ConfigError(f"suite={typed}: expected one suite, or two for the two runs")
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
    first, second = (
        find_evaluation(found, suite) for found, suite in zip(runs, suites * 2, strict=False)
    )
    names = (runs[0].path.name, runs[1].path.name)
    if names[0] == names[1]:
        is_one = runs[0].path.resolve() == runs[1].path.resolve()
        names = (
            (first.result.suite, second.result.suite)
            if is_one
            else (str(runs[0].path), str(runs[1].path))
        )
    show_table(compare(first, second, names))
    return 0
