import json

import pytest

from draftlab.cli.reporting import training_facts
from draftlab.evaluation.acceptance import compute_acceptance
from draftlab.evaluation.results import FORMAT, ArmResult, Conditions, EvalResult
from draftlab.runs.metrics_log import MetricsLog, read_metrics
from draftlab.runs.run_dir import RunDir


def facts_of(run, **folders):
    """Facts for an evaluation of arms whose weights lay in these folders."""
    nothing = compute_acceptance([], seed=0)
    arms = tuple(
        ArmResult(name, "medusa", 1, 2, None, nothing, None, None, (), folder=folder)
        for name, folder in folders.items()
    )
    result = EvalResult(FORMAT, "smoke", Conditions({}, {}), arms, None)
    return training_facts(run, read_metrics(run.metrics_path), result)


def minutes_of(run):
    return facts_of(run)[0].minutes


def steps_of(run, **folders):
    return [(facts.drafter, facts.measured_step) for facts in facts_of(run, **folders)]


@pytest.fixture
def run(tmp_path):
    """A run with a checkpoint."""
    run = RunDir(tmp_path / "adhoc" / "one")
    run.checkpoint_path(21).mkdir(parents=True)
    card = json.dumps({"kind": "medusa", "extra": {}})
    (run.checkpoint_path(21) / "drafter.json").write_text(card)
    run.point("latest", 21)
    return run


def log_steps(run, *lines):
    log = MetricsLog(run.metrics_path)
    for step, seconds in lines:
        log.log(step, "train", **{"time/step_s": seconds})
    log.close()


def test_minutes_weigh_a_line_by_the_steps_that_it_stands_for(run):
    log_steps(run, (10, 1.0), (20, 1.0), (21, 10.0))
    assert minutes_of(run) == pytest.approx(30 / 60)


def test_steps_that_a_resumed_run_repeats_count_once(run):
    log_steps(run, (10, 1.0), (14, 2.0), (20, 9.0))
    log_steps(run, (20, 3.0), (21, 4.0))
    assert minutes_of(run) == pytest.approx((10 * 1 + 4 * 2 + 6 * 3 + 4) / 60)


def test_lines_without_a_time_are_taken_to_be_like_the_others(run):
    log_steps(run, (10, 3.0), (15, float("nan")), (20, 6.0))
    assert minutes_of(run) == pytest.approx(20 * 4.0 / 60)


def test_the_step_is_that_of_the_checkpoint_that_was_evaluated(run):
    log_steps(run, (21, 1.0))
    earlier = str(run.checkpoint_path(10))
    assert steps_of(run, medusa=earlier) == [("medusa", 10)]
    assert steps_of(run, ngram=None, a=earlier, b=str(run.checkpoint_path(21))) == [
        ("a", 10),
        ("b", 21),
    ]
    # the run was moved since
    assert steps_of(run, medusa="/gone/adhoc/one/checkpoints/step-000010") == [("medusa", 10)]


@pytest.mark.parametrize(
    "folder", [None, "/other/run/checkpoints/step-000010", "/adhoc/one/checkpoints/mine"]
)
def test_a_step_that_is_not_known_is_left_out(run, folder):
    log_steps(run, (21, 1.0))
    assert steps_of(run, medusa=folder) == [("medusa", None)]


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_damaged_checkpoint_costs_the_training_s_facts_and_no_more(run, caplog, text):
    log_steps(run, (21, 1.0))
    (run.checkpoint_path(21) / "drafter.json").write_text(text)
    assert steps_of(run) == []
    assert "nothing is said of the training" in caplog.text
