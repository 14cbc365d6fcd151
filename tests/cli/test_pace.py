"""`draftlab check probe=true`: a run's rates, measured on a little of its own work."""

import json
import tempfile

import pytest

from draftlab.cli.launch import compose_run
from draftlab.cli.main import main
from draftlab.cli.pace import measure_pace
from draftlab.decoding.regenerate import regenerate

SMALL = ["recipe=smoke/tiny", "regenerate.max_new_tokens=8", "regenerate.batch_size=4"]


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Let temporary folders be made where the test can see them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return folder


def test_hours_are_told_and_nothing_is_left_behind(temporary, capsys):
    assert main(["check", *SMALL, "probe=true"]) == 0
    out = capsys.readouterr().out
    for line in ("answers, minutes", "training, minutes", "plain decoding", "one process of 1"):
        assert line in out
    assert list(temporary.iterdir()) == []
    assert [path.name for path in (temporary.parent / "here").rglob("*") if path.is_dir()] == []


def test_short_answers_are_given_when_they_are_timed_and_not_found(temporary, monkeypatch):
    limits = []

    def spy(target, questions, answering, store, **more):
        limits.append(answering.max_new_tokens)
        return regenerate(target, questions, answering, store, **more)

    monkeypatch.setattr("draftlab.cli.collect.regenerate", spy)
    measure_pace(compose_run([*SMALL, "regenerate.max_new_tokens=3"])[0])
    assert limits == [3, 3]


def test_given_answers_are_trained_on_and_not_answered(temporary):
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho, ho, ho."}]
    path = temporary.parent / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat, "id": n}) + "\n" for n in range(30)))
    words = [*SMALL, "data=jsonl", f"data.paths={path}", "data.answers=given"]
    pace = measure_pace(compose_run(words)[0])
    assert pace.answering is None
    assert pace.training > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["probe=true", "drafter=ngram"], "drafter=ngram has no weights"),
        (["probe=maybe"], "probe=maybe: expected true or false"),
        (
            ["probe=true", "hardware=fsdp", "hardware.shard=target", "hardware.num_processes=2"],
            "cuts the target over several",
        ),
    ],
)
def test_what_cannot_be_measured_is_code_2(words, message, capsys):
    assert main(["check", *SMALL, *words]) == 2
    assert message in capsys.readouterr().err
