import pytest
from pydantic import PositiveInt

from draftlab.errors import ConfigError
from draftlab.settings.base import Settings, parse_settings


class Inner(Settings):
    num_heads: PositiveInt
    lr: float | None


class Outer(Settings):
    inner: Inner
    names: tuple[str, ...]


GOOD = {"inner": {"num_heads": "3", "lr": "5e-5"}, "names": ["a"]}


def test_typed_text_becomes_numbers():
    assert parse_settings(Outer, GOOD).inner == Inner(num_heads=3, lr=5e-5)


def test_an_unknown_key_is_named_with_a_near_one():
    with pytest.raises(
        ConfigError, match=r"unknown key inner\.num_headz=3; did you mean num_heads"
    ):
        parse_settings(Outer, {**GOOD, "inner": {"num_heads": 3, "lr": None, "num_headz": 3}})


def test_a_wrong_value_and_a_missing_key_are_told_together():
    with pytest.raises(ConfigError) as caught:
        parse_settings(Outer, {"inner": {"num_heads": 0, "lr": "fast"}})
    lines = str(caught.value).splitlines()
    assert [line.split("=")[0].split(" ")[0] for line in lines] == [
        "inner.num_heads",
        "inner.lr",
        "names",
    ]
    assert "'fast'" in lines[1]
    assert "required" in lines[2]


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse_settings(Outer, GOOD).names = ()
