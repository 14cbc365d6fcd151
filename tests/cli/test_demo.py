"""`draftlab demo`: the words it refuses, and the data that its plan is made for."""

import json
import tempfile
import time
from pathlib import Path

import pytest
import torch

from draftlab.cli.demo import Demo
from draftlab.cli.main import main
from draftlab.cli.plan import PLANNED_KEYS, Rates
from draftlab.cli.schema import RunSettings, flat_keys, settings_of
from draftlab.errors import DataError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.compose import compose
from draftlab.targets.tiny import tiny_target

CHAT = [{"role": "user", "content": "Is it on?"}, {"role": "assistant", "content": "It is."}]


@pytest.fixture
def no_demo(monkeypatch):
    """A demo that begins fails the test: the refusal has to come first."""

    def begin(*rest):
        raise AssertionError("a demo was begun")

    monkeypatch.setattr("draftlab.runs.run_dir.create_run", begin)


@pytest.mark.parametrize("key", PLANNED_KEYS)
def test_what_the_plan_decides_is_refused_where_it_is_typed(key, no_demo, tmp_path, capsys):
    assert main(["demo", f"{key}=1", f"paths.outputs={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"{key}=1: the demo decides {key} by the time it has; pass minutes=NUMBER" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resume=never"], "resume=never: equal words go on"),
        (
            ["hardware.num_processes=2", "hardware.threads=1"],
            "hardware.num_processes=2: the demo runs in one process",
        ),
    ],
)
def test_words_without_effect_are_refused(words, message, no_demo, tmp_path, capsys):
    assert main(["demo", *words, f"paths.outputs={tmp_path}"]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plan a demo on chats of one's own; gives settings before and after, and the plan."""
    monkeypatch.setattr(Demo, "_probe", lambda *rest: Rates(60.0, 250.0, 400.0))

    def make(chats, *words):
        path = tmp_path / "own.jsonl"
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
        words = ["data=jsonl", f"data.paths={path}", f"paths.cache={tmp_path}", *words]
        settings = settings_of(RunSettings, compose("train", words))
        demo = Demo(RunDir(Path(tempfile.mkdtemp(dir=tmp_path))), time.monotonic())
        demo.total_s, demo.target = 720.0, tiny_target(dtype=torch.float32)
        return settings, demo._plan(settings), demo.stages["plan"]

    return make


def test_the_plan_counts_the_chats_that_the_target_is_asked(plan, capsys):
    before, after, planned = plan([CHAT, CHAT, [], CHAT], "data.answers=target")
    assert planned["num_prompts"] == 3
    assert planned["answers_per_prompt"] > 1
    assert "about 3 prompts x 4" in capsys.readouterr().out
    old, new = (flat_keys(found.model_dump(mode="json")) for found in (before, after))
    changed = {key for key in new if new[key] != old[key]}
    assert {"regenerate.temperature", "train.max_minutes"} < changed <= set(PLANNED_KEYS)


def test_given_answers_leave_their_time_to_training(plan, capsys):
    _, _, asked = plan([CHAT] * 3000, "data.answers=target")
    capsys.readouterr()
    _, _, given = plan([CHAT] * 3000, "data.answers=given")
    assert (given["num_prompts"], given["answer_s"]) == (0, 0)
    assert given["train_s"] == pytest.approx(asked["train_s"] + asked["answer_s"], abs=2)
    assert "the target answers" not in capsys.readouterr().out


def test_data_that_teaches_nothing_is_told_before_anything_is_measured(plan):
    with pytest.raises(DataError, match="no token to learn"):
        plan([[]], "data.answers=target")
