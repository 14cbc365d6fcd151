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


def evaluation(result, *, steps=50, decode_s=1.0):
    answers = [
        *rows_of("eagle3", "acceptance", tokens=100, steps=steps, decode_s=1.0),
        *rows_of("eagle3", "speed", tokens=100, steps=steps, decode_s=decode_s),
        *rows_of("baseline", "speed", tokens=100, steps=100, decode_s=2.0),
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
