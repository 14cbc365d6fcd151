"""The base of every Settings class, and the one place that turns its errors into words."""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from draftlab.errors import ConfigError

S = TypeVar("S", bound="Settings")

_KEY_WITHOUT_SPACE = re.compile(r"([{,]\s*\w+):(?=\S)")
_ITEM = re.compile(r"\.(\d+)(?=\.|$)")
_LIST = "expected a list, such as [a,b]"
_EXPECTED = {
    "list_type": _LIST,
    "tuple_type": _LIST,
    "int_parsing": "expected a whole number",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
    "float_type": "expected a number",
    "bool_parsing": "expected true or false",
    "bool_type": "expected true or false",
    "string_type": "expected text",
}


class Settings(BaseModel):
    """Frozen settings that refuse unknown keys. Defaults live in conf/*.yaml, not here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _find_group(cls, data: Any, handler: Callable[[Any], Any]) -> Any:
        """Let pydantic note the group of a value that a field's own check refused."""
        try:
            return handler(data)
        except ConfigError as error:
            raise ValueError(str(error)) from None


def parse_settings(cls: type[S], data: Mapping[str, Any], where: str = "") -> S:
    """Check plain data against a Settings class.

    Args:
        cls: the class to build.
        data: composed yaml or parsed JSON.
        where: dotted prefix of the keys, for messages.

    Raises:
        ConfigError: naming every key that is wrong, the value seen, and near names for typos.
    """
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        lines = [_explain(cls, item, where) for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def read_mapping(value: Any) -> Any:
    """Read a mapping that was typed as text, such as {42: -5.0}; anything else stays as it is.

    For `BeforeValidator`: on a command line only the field knows that braces are no plain text.
    """
    if not (isinstance(value, str) and value.startswith("{")):
        return value
    try:
        # yaml wants a space behind the colon: without it {12:5} is a time of day
        return yaml.safe_load(_KEY_WITHOUT_SPACE.sub(r"\1: ", value))
    except yaml.YAMLError:
        return value  # the field says what it expected


def _explain(cls: type[BaseModel], item: Any, where: str) -> str:
    path = [str(part) for part in item["loc"]]
    key = ".".join(([where] if where else []) + path)
    if item["type"] == "extra_forbidden":
        known = _fields_at(cls, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(known)}"
        return f"unknown key {key}={item['input']!r}; {hint}"
    if item["type"] == "missing":
        return f"{key} is required and has no default; pass {key}=VALUE"
    message = _EXPECTED.get(item["type"]) or item["msg"].removeprefix("Value error, ")
    if path[-1:] == ["[key]"]:  # pydantic's word for a key of a mapping
        return f"{key.removesuffix(f'.{path[-2]}.[key]')} has the key {path[-2]!r}: {message}"
    if item["type"] == "value_error" and isinstance(item["input"], Mapping):
        return _name_group(key, message, _fields_at(cls, path))
    key = _ITEM.sub(r"[\1]", key)
    return f"{key}={item['input']!r}: {message.replace('Input should be', 'expected')}"


def _name_group(group: str, message: str, fields: list[str]) -> str:
    """Put a group's name before what is wrong between its keys, where it is not told already."""
    if not group or message.startswith(f"{group}."):
        return message
    names_key = (found := re.match(r"\w+(?==)", message)) is not None and found[0] in fields
    return f"{group}.{message}" if names_key else f"{group}: {message}"


def _fields_at(cls: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = cls.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return sorted(cls.model_fields)
        cls = annotation
    return sorted(cls.model_fields)
