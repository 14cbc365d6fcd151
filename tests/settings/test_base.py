import pytest
from pydantic import PositiveInt, field_validator, model_validator

from draftlab.errors import ConfigError
from draftlab.settings.base import Settings, parse_settings, read_mapping


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


class Crossed(Settings):
    low: int
    high: int
    many: dict[str, int]

    @model_validator(mode="after")
    def _check(self) -> "Crossed":
        if self.low > self.high:
            raise ValueError(f"low={self.low} exceeds high={self.high}; expected at most that")
        if self.low == self.high:
            raise ValueError(f"crossed.low={self.low} is crossed.high; lower it")
        if self.low < 0:
            raise ValueError("expected a number above 0 somewhere")
        return self


class Holder(Settings):
    crossed: Crossed


class Biased(Settings):
    bias: dict[int, float]


def test_a_wrong_key_of_a_mapping_is_named_as_such():
    with pytest.raises(ConfigError) as caught:
        parse_settings(Biased, {"bias": {"x": 1.0}}, where="decode")
    assert str(caught.value) == "decode.bias has the key 'x': expected a whole number"


@pytest.mark.parametrize(
    ("low", "message"),
    [
        (3, "crossed.low=3 exceeds high=2; expected at most that"),
        (2, "crossed.low=2 is crossed.high; lower it"),
        (-1, "crossed: expected a number above 0 somewhere"),
    ],
)
def test_keys_that_do_not_go_together_are_named_and_the_rest_of_the_group_is_not(low, message):
    with pytest.raises(ConfigError) as caught:
        parse_settings(Holder, {"crossed": {"low": low, "high": 2, "many": {"a": 1}}})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("names", "ngram", "names='ngram': expected a list, such as [a,b]"),
        ("inner", {"num_heads": "x", "lr": 1}, "inner.num_heads='x': expected a whole number"),
        ("inner", {"num_heads": 1, "lr": "x"}, "inner.lr='x': expected a number"),
        ("inner", {"num_heads": 0, "lr": 1}, "inner.num_heads=0: expected greater than 0"),
    ],
)
def test_what_was_expected_is_told_in_words(key, value, message):
    with pytest.raises(ConfigError) as caught:
        parse_settings(Outer, {**GOOD, key: value})
    assert str(caught.value) == message


def test_an_item_of_a_list_is_named_by_its_place():
    with pytest.raises(ConfigError) as caught:
        parse_settings(Outer, {**GOOD, "names": ["a", 3]})
    assert str(caught.value) == "names[1]=3: expected text"


class Refused(Settings):
    name: str

    @field_validator("name")
    @classmethod
    def _check(cls, name: str) -> str:
        raise ConfigError(f"name={name!r}: expected another")


class RefusedHolder(Settings):
    refused: Refused


@pytest.mark.parametrize(
    ("cls", "data", "where"),
    [(Refused, {"name": "a"}, "refused"), (RefusedHolder, {"refused": {"name": "a"}}, "")],
)
def test_what_a_lower_room_refuses_is_told_with_its_group(cls, data, where):
    with pytest.raises(ConfigError) as caught:
        parse_settings(cls, data, where=where)
    assert str(caught.value) == "refused.name='a': expected another"


@pytest.mark.parametrize("text", ["{12:5.0}", "{12: 5.0}", "{ 12:5.0 }"])
def test_a_mapping_needs_no_space_behind_its_colons(text):
    assert read_mapping(text) == {12: 5.0}
    assert read_mapping("{a:1,b:[2,3],c: x:y}") == {"a": 1, "b": [2, 3], "c": "x:y"}
