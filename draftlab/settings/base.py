"""The base of every Settings class, and the one place that turns its errors into words."""

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from draftlab.errors import ConfigError

S = TypeVar("S", bound="Settings")


class Settings(BaseModel):
    """Frozen settings that refuse unknown keys. Defaults live in conf/*.yaml, not here."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


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
        return yaml.safe_load(value)
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
    return f"{key}={item['input']!r}: {item['msg'].removeprefix('Value error, ')}"


def _fields_at(cls: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        field = cls.model_fields.get(part)
        annotation = field.annotation if field else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return sorted(cls.model_fields)
        cls = annotation
    return sorted(cls.model_fields)
