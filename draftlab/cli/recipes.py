"""`draftlab recipes`: list, show, copy."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import yaml

from draftlab.errors import ConfigError
from draftlab.settings.compose import Composed, check_recipe_name, compose
from draftlab.settings.locate import recipe_names, recipes_dir

HELP = """
usage: draftlab recipes                       list them
       draftlab recipes NAME [key=value ...]  show one composed: every key, resolved
       draftlab recipes copy NAME FOLDER      copy one to edit; then recipe=FOLDER/FILE.yaml
       draftlab recipes --markdown            the table of recipes/README.md

A recipe is a small yaml that overrides choices of conf/train.yaml; `about:` says what it is.

examples:
  draftlab recipes smoke/tiny
  draftlab recipes smoke/tiny optim.lr=1e-4
  draftlab recipes copy smoke/tiny .
"""


def run(args: list[str]) -> int:
    """List recipes, show one composed, or copy one."""
    if args == ["--markdown"]:
        print(markdown_table(), end="")
    elif not args:
        _list()
    elif args[0] == "copy":
        _copy(args[1:])
    else:
        _show(args[0], args[1:])
    return 0


def summary_of(name: str) -> str:
    """Give the first comment of a recipe that is not for Hydra: what it is, in a sentence."""
    for line in (recipes_dir() / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").strip()
    return ""


def about_of(name: str) -> dict[str, Any]:
    """Give the `about:` block of a recipe; empty when it has none."""
    data = yaml.safe_load((recipes_dir() / f"{name}.yaml").read_text(encoding="utf-8"))
    return data.get("about") or {}


def markdown_table() -> str:
    """Write the table of recipes/README.md from the recipes themselves."""
    lines = [
        "| recipe | what | needs | hours | tau |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in recipe_names():
        about = about_of(name)
        cells = [f"`{name}`", summary_of(name).rstrip(".")]
        cells += [_or_dash(about.get(key)) for key in ("needs", "hours", "tau")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value).replace("|", "\\|")


def _list() -> None:
    names = recipe_names()
    width = max(map(len, names), default=0)
    for name in names:
        print(f"{name:<{width}}  {summary_of(name)}")
    print("\nshow one: draftlab recipes NAME    train it: draftlab train recipe=NAME")


def _show(name: str, words: list[str]) -> None:
    composed = compose("train", [f"recipe={name}", *words])
    if words:
        _check(composed)
    print(yaml.safe_dump(composed.data, sort_keys=False, allow_unicode=True), end="")


def _check(composed: Composed) -> None:
    """Refuse values that are none; keys that a recipe leaves open may stay open here."""
    from draftlab.cli.schema import RunSettings
    from draftlab.settings.base import parse_settings

    parse_settings(RunSettings, _fill(composed.data))


def _fill(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item) for key, item in value.items()}
    return "VALUE" if value == "???" else value


def _copy(args: list[str]) -> None:
    if len(args) != 2:
        raise ConfigError("draftlab recipes copy takes two words: NAME FOLDER")
    name, folder = args
    check_recipe_name(name)
    target = Path(folder).expanduser() / f"{Path(name).name}.yaml"
    if target.exists():
        raise ConfigError(f"{target} exists and is not overwritten; choose another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(recipes_dir() / f"{name}.yaml", target)
    print(f"{target}\nuse it: {shlex.join(['draftlab', 'train', f'recipe={target}'])}")
