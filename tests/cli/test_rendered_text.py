"""Rows of text that the target's chat template has rendered: read before the target is loaded."""

import json

import pytest
import torch

from draftlab.cli import estimate, text_tokenizer
from draftlab.cli.launch import launch_training
from draftlab.cli.main import main
from draftlab.cli.schema import RunSettings, settings_of
from draftlab.cli.text_tokenizer import find_tokenizer
from draftlab.runs.metrics_log import read_metrics
from draftlab.settings.compose import compose
from draftlab.targets.tiny import build_tiny_model, tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}


@pytest.fixture
def data(tmp_path):
    """A file of two chats, one of them rendered."""
    text = tiny_tokenizer().apply_chat_template(CHAT["messages"], tokenize=False)
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (CHAT, {"text": text})))
    return ["data=jsonl", f"data.paths={path}", "data.validation_fraction=0"]


def target_of(*words):
    return settings_of(RunSettings, compose("train", [*words])).target


@pytest.mark.parametrize("skips", [[], ["data.on_bad_line=skip"]])
def test_a_check_counts_rendered_text_among_the_chats(data, capsys, skips):
    assert main(["check", *data, *skips]) == 0
    said = capsys.readouterr().out
    assert "jsonl, 2 chats to train on" in said
    assert "bad line" not in said
    assert "unread" not in said


def test_training_learns_rendered_text(data, tmp_path):
    words = [*data, "train.max_steps=1", "hardware.threads=1", f"paths.outputs={tmp_path / 'out'}"]
    run = launch_training(words)
    assert run.is_finished
    assert "2 chats gave 2 samples to train on" in run.log_path.read_text()
    assert read_metrics(run.metrics_path)


def test_a_check_leaves_out_what_the_target_cannot_be_asked(data, capsys):
    assert main(["check", *data, "data.answers=target"]) == 0
    said = capsys.readouterr().out
    assert "jsonl, 1 chats to train on" in said
    assert (
        "warning: chats left out: 1 (rendered text, whose last question is not cut out); give "
        "rendered text as `messages` or `prompt`" in said
    )


def test_a_run_names_what_the_target_cannot_be_asked(data, tmp_path, caplog):
    caplog.set_level("INFO", logger="draftlab")
    words = ["target=tiny", *data, "regenerate.max_new_tokens=4", f"paths.outputs={tmp_path}"]
    assert main(["regenerate", *words]) == 0
    assert "dropped 1: rendered text, whose last question is not cut out" in caplog.text
    assert "own.jsonl:2 (own.jsonl:2)" in caplog.text


def test_the_tokenizer_is_not_asked_for_where_no_row_is_text(data, tmp_path, monkeypatch):
    def find(target):
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr(estimate, "find_tokenizer", find)
    (tmp_path / "own.jsonl").write_text(json.dumps(CHAT))
    assert main(["check", *data]) == 0


def test_a_tokenizer_that_is_not_here_is_warned_of(data, capsys):
    assert main(["check", "target=hub", "target.name=owner/unheard-of", *data]) == 0
    said = capsys.readouterr().out
    assert "2 chats to train on" in said
    assert (
        "warning: rows of rendered text, counted unread: 1; the tokenizer of owner/unheard" in said
    )


def test_the_tokenizer_of_a_folder_is_found_without_its_weights(tmp_path):
    model = build_tiny_model("llama", torch.float32)
    model.config.save_pretrained(tmp_path)
    words = ["target=local", f"target.name={tmp_path}"]
    assert find_tokenizer(target_of(*words)) is None
    tiny_tokenizer().save_pretrained(tmp_path)
    found = find_tokenizer(target_of(*words))
    assert found.chat_template == tiny_tokenizer().chat_template
    assert found.get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("words", [["target=demo"], ["target=gguf", "target.name=~/x.gguf"]])
def test_the_tokenizer_of_a_gguf_file_is_read_from_it(words, tmp_path, monkeypatch):
    asked = {}

    def load(folder, **named):
        asked.update(named, folder=folder)
        return tiny_tokenizer()

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(text_tokenizer, "find_demo_file", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(text_tokenizer.AutoTokenizer, "from_pretrained", load)
    assert find_tokenizer(target_of(*words)) is not None
    assert asked == {"folder": tmp_path, "gguf_file": "x.gguf"}


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(answers, monkeypatch):
    asked = {}

    def reach(url, timeout):
        if not answers:
            raise TimeoutError

    def load(name, **named):
        asked.update(named, name=name)

    monkeypatch.setattr(text_tokenizer, "get_hf_file_metadata", reach)
    monkeypatch.setattr(text_tokenizer.AutoTokenizer, "from_pretrained", load)
    find_tokenizer(target_of("target=hub", "target.name=a/b", "target.revision=v2"))
    assert asked == {
        "name": "a/b",
        "revision": "v2",
        "trust_remote_code": False,
        "local_files_only": not answers,
    }
