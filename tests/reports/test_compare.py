from dataclasses import replace

import pytest

from draftlab.errors import ConfigError
from draftlab.evaluation.files import Evaluation
from draftlab.evaluation.results import Conditions
from draftlab.reports.compare import compare


def rows_of(arm, phase, *, tokens, steps, decode_s, num=12):
    return [
        {
            "arm": arm, "phase": phase, "domain": "chat", "prompt": i, "repeat": 0,
            "num_decoded_tokens": tokens + i, "num_steps": steps + i, "decode_s": decode_s * (1 + i),
        }
        for i in range(num)
    ]  # fmt: skip


def baseline_rows(*beside, decode_s):
    rows = rows_of("baseline", "speed", tokens=100, steps=100, decode_s=decode_s)
    return [row | {"beside": list(beside)} for row in rows]


def evaluation(result, *, steps=50, decode_s=1.0):
    answers = [
        *rows_of("eagle3", "acceptance", tokens=100, steps=steps, decode_s=1.0),
        *rows_of("eagle3", "speed", tokens=100, steps=steps, decode_s=decode_s),
        *baseline_rows("eagle3", decode_s=2.0),
    ]
    return Evaluation(replace(result, arms=result.arms[1:]), tuple(answers))


def by_name(table):
    return {row.cells[0].text: row.cells for row in table.rows}


def test_an_evaluation_equals_itself(result):
    rows = by_name(compare(evaluation(result), evaluation(result)))
    assert rows["eagle3: tau"][3].text == "+0.0 %"
    assert rows["eagle3: tau"][4].text == "no clear difference"
    assert rows["eagle3: defects"][3].text == "+0"


def test_more_steps_for_the_same_tokens_read_as_a_lower_tau(result):
    rows = by_name(compare(evaluation(result), evaluation(result, steps=60)))
    assert rows["eagle3: tau"][4].text == "lower"
    assert rows["eagle3: tau, chat"][3].text.startswith("-")


def test_speedups_are_compared_against_each_run_s_own_baseline(result):
    rows = by_name(compare(evaluation(result), evaluation(result, decode_s=0.5)))
    assert rows["eagle3: decode speedup"][3].text == "+100.0 %"
    assert rows["eagle3: decode speedup"][4].text == "higher"


def test_an_arm_is_paired_with_the_baseline_of_its_own_stage(result):
    """The machine was half as fast in the stage of the other drafter."""
    one = evaluation(result)
    later = baseline_rows("ngram", decode_s=4.0)
    two = Evaluation(one.result, (*later, *one.answers, *later))
    rows = by_name(compare(one, two))
    assert rows["eagle3: decode speedup"][3].text == "+0.0 %"


def of_old_file(result, *, token_s):
    """Baseline lines that do not say what they were timed beside, and an arm's figure of them."""
    answers = [
        {key: value for key, value in row.items() if key != "beside"}
        for row in evaluation(result).answers
    ]
    arm = result.arms[1]
    arms = (replace(arm, speed=replace(arm.speed, baseline_token_s=token_s)),)
    return Evaluation(replace(result, arms=arms), tuple(answers))


def test_old_files_are_paired_where_the_baseline_is_the_one_of_the_figures(result):
    own = sum(2.0 * (1 + i) for i in range(12)) / sum(100 + i for i in range(12))
    table = compare(of_old_file(result, token_s=own), evaluation(result, decode_s=0.5))
    assert by_name(table)["eagle3: decode speedup"][4].text == "higher"


def test_without_its_own_baseline_the_change_is_of_the_figures_and_says_so(result):
    table = compare(of_old_file(result, token_s=1.0), evaluation(result, decode_s=0.5))
    cells = by_name(table)["eagle3: decode speedup"]
    assert [cell.text for cell in cells[3:]] == ["+0.0 %", "no interval"]
    assert cells[3].note == ""
    assert any("not kept" in remark for remark in table.remarks)


def test_other_conditions_are_refused_and_named(result):
    other = evaluation(result)
    changed = Conditions({**result.conditions.comparable, "threads": 8, "dtype": "float32"}, {})
    other = Evaluation(replace(other.result, conditions=changed), other.answers)
    with pytest.raises(ConfigError, match=r"dtype.*threads: 2 against 8"):
        compare(evaluation(result), other)


def test_evaluations_that_share_no_drafter_are_refused(result):
    two = replace(result, arms=(result.arms[0], replace(result.arms[0], name="x")))
    with pytest.raises(ConfigError, match="share no drafter"):
        compare(Evaluation(replace(result, arms=result.arms[1:]), ()), Evaluation(two, ()))
