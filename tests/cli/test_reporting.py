import json

import pytest

from draftlab.cli.reporting import training_facts
from draftlab.runs.metrics_log import MetricsLog, read_metrics
from draftlab.runs.run_dir import RunDir


def minutes_of(run):
    return training_facts(run, read_metrics(run.metrics_path))[0].minutes


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
