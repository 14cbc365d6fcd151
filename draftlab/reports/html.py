"""report.html: one file, nothing loaded from elsewhere, every text escaped.

In: `ReportInput`. Out: the page's text; `write_report` writes it and its plain twin.
"""

from collections.abc import Sequence
from pathlib import Path

from draftlab.files import write_atomic
from draftlab.reports.facts import ReportInput
from draftlab.reports.glossary import ENGINES, GLOSSARY
from draftlab.reports.markdown import render_markdown
from draftlab.reports.page import build_page
from draftlab.reports.plots import (
    plot_alpha_by_depth,
    plot_emitted_histogram,
    plot_step_time,
    plot_tau_by_domain,
    plot_training,
)


def write_report(
    folder: Path, given: ReportInput, *, also: Sequence[Path] = ()
) -> tuple[Path, Path]:
    """Write report.html and report.md, each atomically.

    Args:
        folder: where to, such as the run's folder.
        given: what to report.
        also: further folders that get the same two files.

    Returns:
        Paths of the two files in `folder`.
    """
    markdown, html = render_markdown(given), render_html(given)
    for place in (*also, folder):
        write_atomic(place / "report.md", markdown)
        write_atomic(place / "report.html", html)
    return folder / "report.html", folder / "report.md"


def render_html(given: ReportInput) -> str:
    """Make the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    result = given.result
    plots = {
        "tau": plot_tau_by_domain(result),
        "alpha": plot_alpha_by_depth(result),
        "emitted": plot_emitted_histogram(result),
        "time": plot_step_time(result) if any(arm.speed for arm in result.arms) else "",
        "training": plot_training(given.metrics),
    }
    environment = Environment(
        loader=PackageLoader("draftlab.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        page=build_page(given),
        # matplotlib has escaped the texts inside; nothing else is trusted
        plots={name: Markup(svg) for name, svg in plots.items()},
        glossary=GLOSSARY,
        engines=ENGINES,
    )
