"""What a user gets wrong ends with one clear error and exit code 2, before any heavy work."""

import json
import sys

import pytest
import torch

from draftlab.cli.main import main
from draftlab.cli.schema import parse_drafter
from draftlab.drafters.store import build_drafter, save_drafter
from draftlab.settings.compose import compose
from draftlab.settings.locate import recipe_names
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Ho."}]}

QUESTION = "<|im_start|>user\nHi?<|im_end|>\n"
RENDERED = QUESTION + "<|im_start|>assistant\nHo.<|im_end|>\n"


@pytest.fixture
def refuse(tmp_path, capsys):
    """Run a command that must be refused; give what it said."""
    outputs = tmp_path / "out"

    def run(command, *words):
        options = [f"paths.outputs={outputs}", "hardware.threads=1"]
        assert main([command, *words, *options]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert said.count(f"draftlab {command}: ") == 1
        return said

    return run


@pytest.fixture
def no_target(monkeypatch):
    """A target that is loaded fails the test: the error has to come first."""

    def load(settings):
        raise AssertionError("a target was loaded")

    # in this order: train_job, if it is imported here, must find the true one
    monkeypatch.setattr("draftlab.cli.train_job.load_target", load)
    monkeypatch.setattr("draftlab.targets.load.load_target", load)


@pytest.mark.parametrize("command", ["train", "eval", "generate", "regenerate"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["decode.temprature=1"], "unknown key decode.temprature; nearest: decode.temperature"),
        (["recipe=smoke/tinny"], "unknown recipe 'smoke/tinny'; nearest: smoke/tiny"),
        (["data.max_tokens=many"], "data.max_tokens='many'"),
    ],
)
def test_words_that_mean_nothing(refuse, no_target, command, words, message):
    assert message in refuse(command, *words)


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("decode.max_new_tokens=3", "eval.max_new_tokens, or eval.speed_max_new_tokens"),
        ("decode.batch_size=2", "eval.batch_size"),
    ],
)
def test_words_that_a_suite_has_its_own_of(refuse, no_target, word, instead):
    assert f"{word} has no effect on eval; pass {instead}" in refuse("eval", "drafter=ngram", word)


def test_an_unknown_recipe_names_near_ones(refuse, no_target):
    said = refuse("train", "recipe=eagle3/smollm2")
    assert "eagle3/smollm2-demo" in said
    assert "eagle3/smollm2-demo" in recipe_names()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["data=jsonl", "data.paths={}"]),
        ("regenerate", ["data=jsonl", "data.paths={}"]),
        ("eval", ["drafter=ngram", "eval.prompts={}"]),
    ],
)
def test_a_missing_file(refuse, no_target, tmp_path, command, words):
    missing = str(tmp_path / "no such (1).jsonl")
    assert "no such (1).jsonl" in refuse(command, *(word.format(missing) for word in words))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [("train", ["init={}"]), ("eval", ["drafter={}"]), ("generate", ["drafter={}", "prompt=Hi"])],
)
def test_a_missing_drafter(refuse, no_target, tmp_path, command, words):
    missing = str(tmp_path / "no" / "drafter")
    assert missing in refuse(command, *(word.format(missing) for word in words))


@pytest.mark.parametrize("command", ["train", "regenerate"])
def test_every_malformed_line_is_named(refuse, no_target, tmp_path, command):
    path = tmp_path / "bad.jsonl"
    lines = [json.dumps(CHAT), '{"messages": ', json.dumps(CHAT), "[1]", '{"id": 3}']
    path.write_text("\n".join(lines))
    said = refuse(command, "data=jsonl", f"data.paths={path}")
    assert "bad.jsonl" in said
    for line in (2, 4, 5):
        assert f"line {line}" in said or f":{line}" in said
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small(refuse, no_target, tmp_path, monkeypatch):
    monkeypatch.setattr("draftlab.cli.estimate.free_bytes", lambda _: 2**20)
    said = refuse("train", "recipe=eagle3/smollm2-demo")
    assert "1 MiB free and this run may write" in said
    assert "paths.outputs=FOLDER" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", []),
        ("check", []),
        ("regenerate", []),
        ("demo", []),
        ("eval", ["drafter=ngram"]),
        ("audit", ["drafter=ngram"]),
        ("skips", []),
    ],
)
def test_outputs_that_are_a_file(no_target, tmp_path, capsys, command, words):
    file = tmp_path / "file"
    file.write_text("")
    assert main([command, *words, f"paths.outputs={file}", "hardware.threads=1"]) == 2
    said = capsys.readouterr().err
    assert f"cannot write into {file}: {file} is no folder; pass paths.outputs=FOLDER" in said
    assert "Traceback" not in said


def test_an_export_into_a_file(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    save_drafter(
        build_drafter(
            parse_drafter(compose("train", ["drafter=medusa"]).data["drafter"]),
            tiny_target(dtype=torch.float32).view,
        ),
        tmp_path / "drafter",
        extra={},
    )
    words = [f"drafter={tmp_path / 'drafter'}", f"out={file / 'mine'}"]
    assert main(["export", *words]) == 2
    assert "is no folder; pass out=FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "train", "regenerate"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optim.lr=inf"], "optim.lr='inf': expected a finite number"),
        (["train.row_tokens=1"], "train.row_tokens='1'"),
        (["data.max_tokens=1"], "data.max_tokens='1'"),
        (["decode.temperature=-1"], "temperature=-1"),
        (["regenerate.temperature=-1"], "temperature=-1"),
        (["decode.top_p=2"], "top_p=2"),
    ],
)
def test_numbers_that_cannot_work(refuse, no_target, tmp_path, command, words, message):
    assert message in refuse(command, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["check", "train", "demo"])
def test_a_tracker_that_is_not_installed(refuse, no_target, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = refuse(command, "tracker=tensorboard")
    assert "pip install 'draftlab[trackers]'" in said


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no chat"),
        ("\n \n", "holds no chat"),
        (json.dumps({"messages": CHAT["messages"][:1]}), "pass data.answers=target"),
    ],
)
def test_data_with_nothing_to_learn(refuse, no_target, tmp_path, command, text, message):
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    said = refuse(command, "data=jsonl", f"data.paths={path}")
    assert message in said
    assert "draftlab regenerate" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("plain words", [], "own.jsonl:1: no chat field (fields: text); text is read only where"),
        (f"{QUESTION}<|im_start|>assistant\n", [], "own.jsonl:1): empty answer"),
        (QUESTION, ["data.answers=target"], "no chat field (fields: text); text is read only"),
        (RENDERED, ["data.answers=target"], "rendered text, whose last question is not cut out"),
    ],
)
def test_rendered_text_with_nothing_to_learn(refuse, no_target, tmp_path, text, words, message):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"text": text}))
    said = [
        refuse(command, "data=jsonl", f"data.paths={path}", *words).removeprefix(
            f"draftlab {command}: "
        )
        for command in ("check", "train")
    ]
    assert message in said[0]
    assert said[0] == said[1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_drafter_to_start_from_that_is_cut_short(refuse, no_target, foreign, command):
    file = foreign / "drafter.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "damaged" in refuse(command, f"init={foreign}")


@pytest.mark.parametrize(("command", "key"), [("eval", "eval.prompts"), ("generate", "prompts")])
def test_no_setting_is_advised_that_has_no_effect(refuse, no_target, tmp_path, command, key):
    path = tmp_path / "bad.jsonl"
    path.write_text("[1]\n")
    said = refuse(command, "drafter=ngram", f"{key}={path}")
    assert "bad.jsonl:1: not an object" in said
    assert "on_bad_line" not in said


def test_bad_lines_that_are_skipped_are_listed_once(tmp_path, capsys, caplog):
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(CHAT) + "\n[1]\n")
    words = ["data=jsonl", f"data.paths={path}", "data.on_bad_line=skip"]
    assert main(["check", *words]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err + caplog.text).count("own.jsonl:2: not an object") == 1


def test_a_tokenizer_of_another_model(refuse, tmp_path):
    folder = tmp_path / "model"
    build_tiny_model("llama", torch.float32, vocab_size=259).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    words = ["target=local", f"target.name={folder}"]
    said = refuse("generate", "prompt=Hi", *words)
    assert "the tokenizer of target" in said
    assert "259 rows" in said
    assert "the tokenizer of target" in refuse("train", *words)


@pytest.fixture
def foreign(tmp_path):
    """A drafter made for a narrower target than the tiny one."""
    target = tiny_target(dtype=torch.float32, hidden_size=32)
    settings = parse_drafter(compose("train", ["drafter=medusa"]).data["drafter"])
    save_drafter(build_drafter(settings, target.view), tmp_path / "foreign", extra={})
    return tmp_path / "foreign"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate", ["drafter={}", "prompt=Hi"]),
        ("eval", ["drafter={}", "eval=smoke"]),
        ("train", ["init={}"]),
    ],
)
def test_a_drafter_trained_for_another_target(refuse, foreign, monkeypatch, command, words):
    def decode(*_, **__):
        raise AssertionError("something was decoded")

    monkeypatch.setattr("draftlab.decoding.decoder.Decoder.generate", decode)
    said = refuse(command, *(word.format(foreign) for word in words))
    assert "was made for target" in said
    assert "hidden_size=32" in said


def test_no_token_to_learn(refuse, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Only a question?"}]}\n')
    said = refuse("train", "data=jsonl", f"data.paths={path}", "data.validation_fraction=0")
    assert "no token to learn" in said or "nothing to learn" in said


def test_an_open_key_of_a_recipe_is_asked_for(refuse, no_target):
    said = refuse("train", "recipe=company/finetune")
    assert "pass init=VALUE data.paths=VALUE" in said


def test_answers_that_are_given_are_not_written(capsys):
    assert main(["regenerate", "data.answers=given"]) == 2
    assert "there is nothing to write; drop it" in capsys.readouterr().err
