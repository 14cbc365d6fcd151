"""`draftlab compare`: two evaluations of the same prompts, side by side."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftlab.cli.words import read_options, split_words
from draftlab.errors import ConfigError

if TYPE_CHECKING:
    from draftlab.reports.tables import Table

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

_WIDTH = 120  # of a table in a file, columns


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
    from draftlab.reports.compare import compare
    from draftlab.runs.run_dir import open_run

    runs = [open_run(thing) for thing in things]
    names = (runs[0].path.name, runs[1].path.name)
    if names[0] == names[1]:
        names = (str(runs[0].path), str(runs[1].path))
    first, second = (find_evaluation(found, suite) for found in runs)
    _print(compare(first, second, names))
    return 0


def _print(table: "Table") -> None:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(*table.columns, title=table.title)
    for row in table.rows:
        # Text: a name in brackets is a name, not a style
        cells = (f"{c.text} ({c.note})" if c.note else c.text for c in row.cells)
        grid.add_row(*(Text(cell) for cell in cells))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(grid)
    for remark in table.remarks:
        console.print(Text(remark))
