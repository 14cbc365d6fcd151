"""Variables of the chat template reach every prompt that a target is asked."""

import pytest

from draftlab.cli.drafters import compose_for_drafters
from draftlab.cli.main import main
from draftlab.data import chat
from draftlab.errors import DataError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.compose import compose

THOUGHTLESS = {"enable_thinking": False}


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "drafter=ngram", "prompt=Hi"],
        ["eval", "drafter=ngram"],
        ["audit", "drafter=ngram"],
        ["bench", "decode", "drafter=ngram"],
        ["skips"],
    ],
)
def test_a_command_asks_with_them(words, tmp_path, monkeypatch, capsys):
    asked = []

    def stop(tokenizer, messages, tools, options):
        asked.append(dict(options))
        raise DataError("asked")

    monkeypatch.setattr(chat, "encode_prompt", stop)
    typed = [
        "target=tiny",
        f"paths.outputs={tmp_path}",
        "data.template_options.enable_thinking=false",
    ]
    assert main([*words, *typed]) == DataError.exit_code
    assert capsys.readouterr().err.strip().endswith("asked")
    assert asked == [THOUGHTLESS]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    data = compose("train", ["data.template_options.enable_thinking=false"]).data
    run.write_config({group: data[group] for group in ("target", "hardware", "data")})
    run.checkpoint_path(3).mkdir(parents=True)
    (run.checkpoint_path(3) / "drafter.json").write_text("{}")
    run.point("latest", 3)
    return run


def test_a_drafter_is_measured_on_the_law_it_was_trained_for(run):
    data = compose_for_drafters("eval", [f"drafter={run.path}"]).data["data"]
    assert data["template_options"] == THOUGHTLESS
    assert data["kind"] == compose("eval", []).data["data"]["kind"]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.template_options.enable_thinking=true", {"enable_thinking": True}),
        ("data=builtin", {}),
        ("target=demo", {}),
    ],
)
def test_what_is_typed_beats_the_run(run, word, expected):
    data = compose_for_drafters("eval", [f"drafter={run.path}", word]).data["data"]
    assert data["template_options"] == expected
