"""README says what is so: its commands compose, its Python lines run."""

import re
import shlex
import shutil

import pytest
import torch

import draftlab.drafters
from draftlab.cli import main, schema
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import Drafter, drafter_class
from draftlab.drafters.store import build_drafter, save_drafter
from draftlab.runs.run_dir import RunDir
from draftlab.settings.base import parse_settings
from draftlab.settings.compose import compose
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target

ROOT = conf_dir().parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PRIMARIES = {
    "train": ("train", schema.RunSettings),
    "check": ("train", schema.RunSettings),
    "regenerate": ("train", schema.RunSettings),
    "demo": ("train", schema.RunSettings),
    "eval": ("eval", schema.EvalCommandSettings),
    "audit": ("audit", schema.AuditCommandSettings),
    "bench": ("eval", schema.EvalCommandSettings),
    "generate": ("generate", schema.GenerateCommandSettings),
    "export": ("export", schema.ExportCommandSettings),
}
ECHO = "drafter=echo"  # README's own example: it has a test of its own
OWN_WORDS = ("minutes=", "fresh=", "out=", "resume=", "families=")  # a command's own, not settings


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def command_lines():
    """Find every draftlab command of README, in blocks and in running text."""
    lines = [line for block in blocks("console") for line in block.splitlines()]
    lines += re.findall(r"`(draftlab [^`]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words and words[0] == "draftlab" and ECHO not in words]


def test_there_are_commands_and_python_lines():
    assert len(command_lines()) >= 8
    assert len(blocks("python")) == 2


@pytest.mark.parametrize("words", command_lines(), ids=" ".join)
def test_a_command_of_the_readme_composes(words):
    if words[1:] in (["--help"], ["COMMAND", "--help"]):
        return
    command, rest = words[1], words[2:]
    assert command in main.COMMANDS
    if command not in PRIMARIES:
        return
    primary, settings = PRIMARIES[command]
    rest = [word for word in rest if "=" in word and not word.startswith(OWN_WORDS)]
    schema.settings_of(settings, compose(primary, rest))


def test_a_word_that_means_nothing_would_be_noticed():
    with pytest.raises(Exception, match="unknown key"):
        compose("train", ["train.max_minuts=20"])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run folder at the place that README names, for the tiny target."""
    monkeypatch.chdir(tmp_path)
    target = tiny_target(dtype=torch.float32)
    data = compose("train", ["target.kernels=reference"]).data
    made = RunDir(tmp_path / "outputs/eagle3/smollm2-demo/RUN")
    made.write_config({"target": data["target"], "hardware": data["hardware"]})
    drafter = build_drafter(schema.parse_drafter(data["drafter"]), target.view)
    save_drafter(drafter, made.checkpoint_path(1), extra={})
    made.point("latest", 1)
    return made


@pytest.mark.demo
def test_the_python_lines_answer(run, capsys):
    lines = blocks("python")[0]
    assert len([line for line in lines.splitlines() if line]) <= 6
    exec(compile(lines, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", draftlab.__all__)
def test_a_public_name_is_there_when_asked_for(name):
    assert callable(getattr(draftlab, name))


@pytest.fixture
def echo(tmp_path, monkeypatch):
    """README's drafter, put where it says."""
    code = tmp_path / "drafters"
    code.mkdir()
    (code / "echo.py").write_text(blocks("python")[1])
    monkeypatch.setattr(draftlab.drafters, "__path__", [*draftlab.drafters.__path__, str(code)])
    yield drafter_class("echo")
    Drafter.by_kind.pop("echo", None)


def test_the_drafter_of_the_readme_works_and_changes_nothing(echo, tmp_path):
    (text,) = (block for block in blocks("yaml") if "kind: echo" in block)
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    (conf / "drafter" / "echo.yaml").write_text(text)
    assert f"draftlab eval {ECHO}" in TEXT
    settings = schema.settings_of(
        schema.EvalCommandSettings, compose("eval", [ECHO], conf=conf)
    ).drafter
    assert isinstance(settings, echo.settings_class)
    target = tiny_target()
    drafter = build_drafter(settings, target.view)
    decode = parse_settings(DecodeSettings, compose("generate", []).data["decode"])
    prompts = [[1, 2, 3, 4], [7] * 9, [5]]
    plain = Decoder(target, None, decode).generate(prompts, max_new_tokens=24, batch_size=2)
    sped = Decoder(target, drafter, decode).generate(prompts, max_new_tokens=24, batch_size=2)
    assert [a.output_ids for a in sped] == [a.output_ids for a in plain]
    assert sum(s.num_drafted for a in sped for s in a.steps) > 0
