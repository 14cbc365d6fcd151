from pathlib import Path

import pytest
import yaml

from draftlab.data.settings import DataSettings
from draftlab.errors import ConfigError
from draftlab.settings.base import parse_settings

CONF = Path(__file__).parents[2] / "conf" / "data"
FILES = sorted(CONF.glob("*.yaml"))


def load(name, **changes):
    data = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return {**data, **changes}


def test_there_are_three_kinds_each_with_a_yaml_of_its_name():
    kinds = ["builtin", "hub", "jsonl"]
    assert [load(kind)["kind"] for kind in kinds] == kinds
    assert {load(path.stem)["kind"] for path in FILES} == set(kinds)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_yaml_states_every_key_and_no_other(path):
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(data) == set(DataSettings.model_fields)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_has_a_comment(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert all("#" in line for line in lines if line.strip())


def test_one_path_may_be_given_as_text():
    settings = parse_settings(DataSettings, load("jsonl", paths="What's (1), 日本.jsonl"), "data")
    assert settings.paths == ("What's (1), 日本.jsonl",)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("jsonl", {"paths": []}, "pass data.paths=FILE"),
        ("builtin", {"paths": ["x.jsonl"]}, r"x\.jsonl.*would be ignored with kind=builtin"),
        ("hub", {"hub_name": None}, "data.hub_name=OWNER/NAME"),
        ("jsonl", {"paths": ["x"], "hub_name": "a/b"}, "a/b would be ignored"),
        ("builtin", {"answers": "given"}, "data.answers=target"),
        ("builtin", {"turns": "all"}, "data.turns='all'"),
        ("builtin", {"validation_fraction": 1.0}, "data.validation_fraction=1.0"),
    ],
)
def test_settings_that_cannot_work_say_what_to_pass(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_settings(DataSettings, load(name, **changes), "data")
