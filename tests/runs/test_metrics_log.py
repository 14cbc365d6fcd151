import json

import pytest

from draftlab.errors import CheckpointError
from draftlab.runs.metrics_log import MetricsLog, read_metrics


def test_each_call_is_one_line_that_a_reader_sees_at_once(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(1, "train", **{"train/loss": 2.5, "train/tokens": 10})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    log.close()
    assert [(row["step"], row["split"], row["train/loss"]) for row in rows] == [(1, "train", 2.5)]
    assert rows[0]["time_s"] >= 0


def test_a_torn_last_line_is_dropped_on_reopening(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(1, "train", loss=3.0)
    log.close()
    with path.open("a") as file:
        file.write('{"step": 2, "time_s"')
    assert [row["step"] for row in read_metrics(path)] == [1]
    log = MetricsLog(path)
    log.log(2, "train", loss=2.0)
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_repeated_step_counts_once_with_its_last_numbers(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    for step, loss in ((1, 3.0), (2, 2.0), (2, 1.5)):
        log.log(step, "train", loss=loss)
    log.log(2, "validation", tau=1.2)
    log.close()
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [(row["step"], row["split"]) for row in rows] == [
        (1, "train"),
        (2, "train"),
        (2, "validation"),
    ]
    assert rows[1]["loss"] == 1.5


def test_steps_that_a_resume_took_back_are_gone_though_never_repeated(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for steps in ((10, 20, 30, 40), (30,)):  # killed after 40, gone on from 20, ended at 30
        log = MetricsLog(path)
        for step in steps:
            log.log(step, "train", loss=float(len(steps)))
            log.log(step, "validation", tau=1.0)
        log.close()
    rows = read_metrics(path)
    assert [(r["step"], r["split"]) for r in rows] == [
        (step, split) for step in (10, 20, 30) for split in ("train", "validation")
    ]
    assert [r["loss"] for r in rows if r["split"] == "train"] == [4.0, 4.0, 1.0]


def test_time_goes_on_after_a_resume(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "time_s": 100.0, "split": "train"}\n')
    log = MetricsLog(path)
    log.log(2, "train")
    log.close()
    assert read_metrics(path)[1]["time_s"] >= 100.0


def test_what_is_no_number_is_written_as_null(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.log(1, "train", loss=float("inf"))
    log.close()
    assert read_metrics(tmp_path / "m.jsonl")[0]["loss"] is None


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "time_s": 1, "split": "a"}\nrubbish\n{"step": 2}\n')
    with pytest.raises(CheckpointError, match=r"m\.jsonl, line 2: .*'rubbish'"):
        read_metrics(path)


def test_no_file_has_no_rows(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []
