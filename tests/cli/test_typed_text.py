"""Paths and prompts reach the work as they were typed, through real commands."""

import json

import pytest

from draftlab.cli.main import main
from draftlab.runs.run_dir import list_runs

CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}
NAMES = ["x.jsonl", "My Data (1).jsonl", "a,b.jsonl", "What's 2+2?.jsonl", "次のデータ.jsonl"]


def write(path):
    path.write_text((json.dumps(CHAT) + "\n") * 2)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_any_name_is_read(name, tmp_path, capsys):
    path = write(tmp_path / name)
    words = ["data=jsonl", f"data.paths={path}", "data.validation_fraction=0"]
    assert main(["check", *words]) == 0
    assert "jsonl, 2 chats to train on" in capsys.readouterr().out


def test_the_home_folder_may_be_a_tilde(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "x.jsonl")
    assert main(["check", "data=jsonl", "data.paths=~/x.jsonl", "data.validation_fraction=0"]) == 0
    assert "jsonl, 2 chats to train on" in capsys.readouterr().out


def test_training_takes_odd_names_to_its_end(tmp_path):
    path = write(tmp_path / "My Data (1), 次.jsonl")
    outputs = tmp_path / "Läufe, (2)"
    words = ["data=jsonl", f"data.paths={path}", "data.validation_fraction=0"]
    words += ["train.max_steps=1", "hardware.threads=1", f"paths.outputs={outputs}"]
    assert main(["train", *words]) == 0
    (run,) = list_runs(outputs)
    assert run.is_finished
    assert run.read_config()["data"]["paths"] == [str(path)]


@pytest.mark.parametrize("prompt", ["What's 2+2?", "日本の首都は？", "[a, b]", "null", "x=y, ~/z"])
def test_a_prompt_is_asked_as_it_was_typed(prompt, monkeypatch, capsys):
    from draftlab.data import chat

    asked = []
    encode = chat.encode_prompt

    def spy(tokenizer, messages, *more):
        asked.append(messages)
        return encode(tokenizer, messages, *more)

    monkeypatch.setattr(chat, "encode_prompt", spy)
    words = ["decode.max_new_tokens=4", "hardware.threads=1", "target.kernels=reference"]
    assert main(["generate", f"prompt={prompt}", *words]) == 0
    assert asked == [[{"role": "user", "content": prompt}]]
    assert "4 tokens" in capsys.readouterr().err
