"""report.md: the report as text, for terminals, reviews and version control."""

from draftlab.reports.facts import ReportInput
from draftlab.reports.glossary import ENGINES, GLOSSARY
from draftlab.reports.page import Page, build_page
from draftlab.reports.tables import Cell, Table


def render_markdown(given: ReportInput) -> str:
    """Write the page as Markdown."""
    page = build_page(given)
    blocks = [
        f"# {_escape(page.title)}",
        _escape(page.subtitle),
        f"**{_escape(page.verdict.headline)}**",
        _list(page.verdict.lines),
        render_table(page.summary),
        "## By domain",
        *[render_table(table, level=3) for table in page.domains],
        "## Acceptance",
        render_table(page.acceptance, level=3),
        *([render_table(page.speed)] if page.speed else []),
        "## Losslessness",
        _list(page.lossless),
        *([render_table(page.defects, level=3)] if page.defects else []),
        *[render_table(table) for table in page.lengths],
        *([render_table(page.training)] if page.training else []),
        "## Conditions",
        _list([f"{name}: {value}" for name, value in page.conditions]),
        "## Not measured",
        _list(page.not_measured),
        "## What the figures mean",
        _list([f"{term}: {meaning}" for term, meaning in GLOSSARY]),
        "## Which figure other engines print",
        _list(ENGINES),
        *_samples(page),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _samples(page: Page) -> list[str]:
    if not page.samples:
        return []
    blocks = ["## Samples"]
    for sample in page.samples:
        blocks.append(f"### {_escape(sample.domain)}")
        blocks += [_quote("prompt", sample.prompt), _quote("answer", sample.output)]
    return blocks


def _quote(name: str, text: str) -> str:
    return "\n".join(f"> {_escape(line)}" for line in [f"{name}:", *text.splitlines()])


def render_table(table: Table, level: int = 2) -> str:
    """Write one table under a heading of a level, its remarks below it."""
    lines = [f"{'#' * level} {_escape(table.title)}", ""]
    lines.append("| " + " | ".join(_escape(c) for c in table.columns) + " |")
    lines.append("|" + "---|" * len(table.columns))
    for row in table.rows:
        cells = [_cell(cell) for cell in row.cells]
        if row.mark:
            cells[0] = f"**{cells[0]}** ({_escape(row.mark)})"
        lines.append("| " + " | ".join(cells) + " |")
    for remark in table.remarks:
        lines += ["", _escape(remark)]
    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    return _escape(f"{cell.text} ({cell.note})" if cell.note else cell.text)


def _list(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {_escape(line)}" for line in lines)


def _escape(text: str) -> str:
    """Keep a text a text: no markup, no tags, no table borders, one line."""
    text = " ".join(text.split())
    for mark in "\\`*_[]|":
        text = text.replace(mark, "\\" + mark)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
