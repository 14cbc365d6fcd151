import pytest

from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.runs.trackers import TrackerSettings, open_tracker
from draftlab.settings.base import parse_settings

SECRET = "0123456789abcdef0123456789abcdef01234567"


def settings(kind):
    return TrackerSettings(kind=kind, project="draftlab", mode="offline")


def test_an_unknown_tracker_is_refused_by_name():
    data = {"kind": "mlflow", "project": "x", "mode": "offline"}
    with pytest.raises(ConfigError, match="kind='mlflow'"):
        parse_settings(TrackerSettings, data)


def test_none_writes_nothing(tmp_path):
    tracker = open_tracker(settings("none"), RunDir(tmp_path), {})
    tracker.log(1, "train", {"loss": 1.0})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_files_lie_in_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    tracker = open_tracker(settings("tensorboard"), RunDir(tmp_path), {})
    tracker.log(1, "train", {"loss": 1.0})
    tracker.close()
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_missing_tensorboard_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"draftlab\[trackers\]"):
        open_tracker(settings("tensorboard"), RunDir(tmp_path), {})


@pytest.mark.slow
def test_wandb_offline_keeps_all_in_the_run_and_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    tracker = open_tracker(settings("wandb"), RunDir(tmp_path), {"seed": 3})
    tracker.log(1, "train", {"train/loss": 1.5, "tokens": 2.0})
    tracker.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
