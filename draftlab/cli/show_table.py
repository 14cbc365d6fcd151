"""A report's table in the terminal."""

import sys

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from draftlab.reports.tables import Table

_WIDTH = 120  # of a table in a file, columns


def show_table(table: Table, *, is_dense: bool = False, width: int = _WIDTH) -> None:
    """Print a table and its remarks.

    Args:
        table: what to print.
        is_dense: without borders, and small print below its figure: for many columns.
        width: columns of the page where there is no terminal.
    """
    grid = Grid(*table.columns, title=table.title, box=SIMPLE_HEAD if is_dense else HEAVY_HEAD)
    if is_dense:
        grid.padding = (0, 1, 0, 0)
    for row in table.rows:
        # Text: a name in brackets is a name, not a style
        cells = [f"{c.text} ({c.note})" if c.note else c.text for c in row.cells]
        if is_dense:
            cells = [f"{c.text}\n{c.note}" if c.note else c.text for c in row.cells]
            cells[0] += f"\n({row.mark})" if row.mark else ""
        grid.add_row(*(Text(cell) for cell in cells))
    console = Console(width=None if sys.stdout.isatty() else width)
    console.print(grid)
    for remark in table.remarks:
        console.print(Text(remark))
