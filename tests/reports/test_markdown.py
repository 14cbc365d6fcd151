from dataclasses import replace

from draftlab.reports.facts import ReportInput, Sample
from draftlab.reports.markdown import render_markdown


def test_every_table_row_has_as_many_cells_as_its_head(result):
    lines = render_markdown(ReportInput(result)).splitlines()
    width = None
    rows = 0
    for line in lines:
        if line.startswith("|"):
            cells = line.replace("\\|", "").count("|")
            width = width or cells
            assert cells == width
            rows += 1
        else:
            width = None
    assert rows > 60


def test_text_cannot_break_a_table_or_smuggle_markup(result):
    arm = replace(result.arms[0], name="a|b\n# <img src=x> [x](y) `z`")
    text = render_markdown(ReportInput(replace(result, arms=(arm,))))
    assert "<img" not in text
    assert "a\\|b # &lt;img src=x&gt; \\[x\\](y) \\`z\\`" in text
    assert not any(line.startswith("# <") for line in text.splitlines())


def test_samples_are_quoted_line_by_line(result):
    text = render_markdown(ReportInput(result, samples=(Sample("chat", "a\nb", "c"),)))
    assert "> prompt:\n> a\n> b" in text
