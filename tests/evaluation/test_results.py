import json
from dataclasses import replace

import pytest

from draftlab.errors import CheckpointError, ConfigError
from draftlab.evaluation.acceptance import compute_acceptance
from draftlab.evaluation.results import (
    FORMAT,
    ArmResult,
    Conditions,
    DomainResult,
    Estimate,
    EvalResult,
    merge,
    read_result,
    result_from_json,
    result_to_json,
)
from tests.evaluation.scripted import generation, step


def result_of(*names, temperature=0.0):
    stats = compute_acceptance([generation([step(2, 1)], index=i) for i in range(9)], seed=0)
    arms = tuple(
        ArmResult(name, name, 0, 2, None, stats, None, None, (DomainResult("math", stats, None),))
        for name in names
    )
    conditions = Conditions({"target": "tiny", "temperature": temperature}, {"note": "x"})
    return EvalResult(FORMAT, "smoke", conditions, arms, None)


def test_a_result_survives_json_exactly():
    result = result_of("ngram")
    assert result_from_json(json.loads(json.dumps(result_to_json(result)))) == result


def test_stages_merge_in_order_and_a_repeated_arm_is_replaced():
    merged = merge(result_of("ngram", "eagle3"), result_of("eagle3", "medusa"))
    assert [arm.name for arm in merged.arms] == ["ngram", "eagle3", "medusa"]


@pytest.mark.parametrize("disturbed_first", [True, False])
def test_arms_of_both_stages_are_judged_by_the_wider_noise_floor(disturbed_first):
    calm, disturbed = Estimate(1.0, 0.99, 1.01, 36, "t"), Estimate(1.1, 0.4, 1.5, 36, "t")
    floors = (disturbed, calm) if disturbed_first else (calm, disturbed)
    stages = [
        replace(result_of(name), noise_floor=floor)
        for name, floor in zip(("ngram", "eagle3"), floors, strict=True)
    ]
    assert merge(*stages).noise_floor == disturbed
    assert merge(stages[0], replace(stages[1], noise_floor=None)).noise_floor == floors[0]


def test_stages_under_other_conditions_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"temperature: 0\.0 against 1\.0"):
        merge(result_of("ngram"), result_of("eagle3", temperature=1.0))


def test_another_suite_is_refused():
    with pytest.raises(ConfigError, match="suite"):
        merge(result_of("ngram"), replace(result_of("eagle3"), suite="other"))


def test_an_unknown_arm_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'medusa'.*ngram"):
        result_of("ngram").arm("medusa")


@pytest.mark.parametrize("text", ["", "[1]", '{"format": 99}', '{"format": 1, "suite": "x"}'])
def test_what_is_no_evaluation_is_refused(tmp_path, text):
    path = tmp_path / "summary.json"
    path.write_text(text)
    with pytest.raises(CheckpointError):
        read_result(path)
