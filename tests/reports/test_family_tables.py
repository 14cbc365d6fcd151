from dataclasses import replace

from draftlab.reports.facts import TrainingFacts
from draftlab.reports.families import FamilyResult, ProbePoint, family_data, family_tables

TRAINING = TrainingFacts("eagle3", 480, 5.02, 60_000, 768, "answered by the target", 450)
PROBES = (
    ProbePoint(150, 4.0, 1.40, 31.0),
    ProbePoint(300, 3.0, 1.50, 30.0),
    ProbePoint(480, 2.0, 1.45, 29.0),
)


def results_of(result):
    ngram, eagle = result.arms
    return [
        FamilyResult("ngram", ngram, None, ()),
        FamilyResult("eagle3", eagle, TRAINING, PROBES),
    ]


def test_the_first_table_has_a_row_a_family_and_marks_the_best(result):
    table = family_tables(results_of(result))[0]
    assert [row.cells[0].text for row in table.rows] == ["ngram", "eagle3"]
    assert [row.mark for row in table.rows] == ["", "longest, fastest"]
    eagle = dict(zip(table.columns, table.rows[1].cells, strict=True))
    assert eagle["trained parameters"].text == "9.70 M"
    assert (eagle["minutes"].text, eagle["steps"].text, eagle["K"].text) == ("5.0", "480", "3")
    assert eagle["tau"].note
    assert eagle["decode speedup"].note
    assert eagle["defects"].text == "0"
    assert table.rows[0].cells[2].text == "–"


def test_domains_are_rows_and_families_columns_with_the_pooled_figure_last(result):
    table = family_tables(results_of(result))[1]
    assert table.columns == ("domain", "ngram", "eagle3")
    assert len(table.rows) == 13
    tau = result.arms[1].acceptance.tau
    assert table.rows[-1].cells[2].text == f"{tau.value:.2f}"
    assert table.rows[0].cells[1].note


def test_a_domain_that_a_family_was_not_measured_on_is_a_dash(result):
    ngram, eagle = results_of(result)
    short = replace(eagle, arm=replace(eagle.arm, domains=eagle.arm.domains[1:]))
    assert family_tables([ngram, short])[1].rows[0].cells[2].text == "–"


def test_the_end_table_tells_where_tau_speed_and_loss_disagree(result):
    row = family_tables(results_of(result))[2].rows[0]
    assert [cell.text for cell in row.cells] == [
        "eagle3", "3", "step 300", "step 150", "step 480", "disagree",
    ]  # fmt: skip
    assert row.cells[2].note == "1.500, 30.0 tokens/s"
    same = replace(results_of(result)[1], probes=PROBES[:1])
    assert family_tables([same])[2].rows[0].cells[-1].text == "agree"


def test_nothing_probed_leaves_the_end_table_out(result):
    assert len(family_tables(results_of(result)[:1])) == 2


def test_plain_data_say_the_same(result):
    data = family_data(results_of(result)[1])
    speed = result.arms[1].speed
    assert data["tau"]["value"] == result.arms[1].acceptance.tau.value
    assert data["draft_ratio"] == speed.draft_ratio
    assert len(data["tau_by_domain"]) == 12
    assert data["probes"][1]["tau"] == 1.50
    assert data["training"]["minutes"] == 5.02
