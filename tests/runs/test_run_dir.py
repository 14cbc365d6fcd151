import re
from datetime import datetime

import pytest

from draftlab.errors import CheckpointError
from draftlab.files import write_atomic
from draftlab.runs.run_dir import (
    RunDir,
    create_run,
    list_runs,
    new_run_id,
    open_run,
    write_json,
)


def test_two_runs_of_one_second_get_two_folders():
    now = datetime(2026, 11, 29, 14, 7, 5)
    ids = {new_run_id(now) for _ in range(50)}
    assert len(ids) > 45
    assert all(re.fullmatch(r"20261129-140705-[a-z2-9]{4}", run_id) for run_id in ids)


def test_a_run_is_never_overwritten(tmp_path):
    create_run(tmp_path, "smoke/tiny", run_id="one")
    with pytest.raises(CheckpointError, match=r"smoke/tiny/one exists and is never overwritten"):
        create_run(tmp_path, "smoke/tiny", run_id="one")


def test_config_comes_back_as_written_in_its_order(tmp_path):
    run = create_run(tmp_path, "adhoc")
    data = {"seed": 0, "about": None, "path": "次 (1).jsonl", "list": [1, "no", 1e-4]}
    run.write_config(data)
    assert open_run(run.path).read_config() == data
    assert list(run.read_config()) == list(data)


def test_a_missing_run_and_a_folder_that_is_no_run_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run .*/nowhere"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.yaml"):
        open_run(str(tmp_path))


def test_pointers_are_text_files_that_name_checkpoints(tmp_path):
    run = RunDir(tmp_path)
    assert run.pointed("latest") is None
    run.checkpoint_path(500).mkdir(parents=True)
    run.point("latest", 500)
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000500\n"
    assert run.pointed("latest") == run.checkpoint_path(500)


def test_a_pointer_to_a_checkpoint_that_is_gone_is_an_error(tmp_path):
    run = RunDir(tmp_path)
    run.point("best", 3)
    with pytest.raises(CheckpointError, match="names step-000003"):
        run.pointed("best")


def test_a_held_run_is_running_and_cannot_be_held_again(tmp_path):
    run = create_run(tmp_path, "adhoc")
    assert not run.is_running
    with run.hold():
        assert run.is_running
        with pytest.raises(CheckpointError, match="being written by another process"), run.hold():
            pass
    assert not run.is_running


def test_looking_whether_a_run_is_running_writes_nothing(tmp_path):
    run = create_run(tmp_path, "adhoc")
    assert not run.is_running
    assert list(run.path.iterdir()) == []
    with run.hold():
        pass
    assert not run.is_running


def test_a_run_that_cannot_be_written_is_refused_with_a_way_out(tmp_path):
    run = create_run(tmp_path, "adhoc")
    (run.path / ".lock").mkdir()  # as root, permissions would refuse nothing
    with (
        pytest.raises(CheckpointError, match=r"cannot write into run .*paths\.outputs"),
        run.hold(),
    ):
        pass


def test_runs_are_listed_by_time_over_all_families(tmp_path):
    for name, run_id in (("b", "20260102-1"), ("a/x", "20260103-1"), ("c", "20260101-1")):
        create_run(tmp_path, name, run_id=run_id).write_config({})
    (tmp_path / "cache").mkdir()
    assert [run.path.name for run in list_runs(tmp_path)] == [
        "20260101-1",
        "20260102-1",
        "20260103-1",
    ]
    assert list_runs(tmp_path / "nowhere") == []


def test_a_finished_run_says_so(tmp_path):
    run = RunDir(tmp_path)
    assert not run.is_finished
    run.mark_finished()
    assert run.is_finished


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a/b.txt"
    write_atomic(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["b.txt"]


def test_json_refuses_what_is_no_number(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert not (tmp_path / "x.json").exists()
