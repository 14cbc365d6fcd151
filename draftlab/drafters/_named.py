"""Drafters inside drafters, by name: settings of a kind, or the folder of a trained one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from draftlab.drafters.base import DrafterSettings, drafter_class, drafter_kinds
from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir


def settings_by_name(value: Any, where: str) -> Any:
    """Turn a kind's name, or all of its keys, into its Settings; other values stay as they are.

    Args:
        value: what a yaml or a command line says.
        where: the key that says it, for messages.

    Raises:
        ConfigError: unknown kind, or a wrong key.
    """
    if isinstance(value, str) and value in drafter_kinds():
        path = conf_dir() / "drafter" / f"{value}.yaml"
        if not path.is_file():
            raise ConfigError(
                f"{where}={value}: no {path.name} in {path.parent} says its settings; pass all of "
                "its keys instead of the name"
            )
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    if isinstance(value, Mapping):
        kind = str(value.get("kind"))
        return parse_settings(drafter_class(kind).settings_class, value, where=where)
    return value


def settings_or_folder(value: Any, where: str) -> DrafterSettings | str:
    """Turn a kind into its Settings, and the name of a run or a drafter's folder into that folder.

    Raises:
        ConfigError: neither.
        CheckpointError: a run without a checkpoint.
    """
    found = settings_by_name(value, where)
    if isinstance(found, DrafterSettings):
        return found
    path = Path(str(found)).expanduser().absolute()
    if (path / "drafter.json").is_file():
        return str(path)
    run = RunDir(path)
    if run.config_path.is_file() and (best := run.pointed("best") or run.pointed("latest")):
        return str(best)
    raise ConfigError(
        f"{where}={found}: expected a run or folder of a trained drafter, or one of "
        f"{', '.join(drafter_kinds())}"
    )
