"""Defaults have one home: what a Settings class asks for, its yaml says, and nothing more."""

import re
from pathlib import Path

import pytest
import yaml

from draftlab.cli.schema import (
    AuditCommandSettings,
    EvalCommandSettings,
    ExportCommandSettings,
    GenerateCommandSettings,
    RunSettings,
    flat_keys,
    settings_of,
)
from draftlab.drafters.base import drafter_class, drafter_kinds
from draftlab.settings.compose import compose
from draftlab.settings.locate import conf_dir, recipe_names

CONF = conf_dir()
OVERLAYS = {"debug"}  # partial on purpose: they override keys of other groups
PRIMARIES = {
    "train": RunSettings,
    "eval": EvalCommandSettings,
    "audit": AuditCommandSettings,
    "generate": GenerateCommandSettings,
    "export": ExportCommandSettings,
}
OPTIONS = sorted(path for path in CONF.glob("*/*.yaml") if path.parent.name not in OVERLAYS)


def name_of(path: Path) -> str:
    return f"{path.parent.name}={path.stem}"


def settings_class_of(path: Path):
    if path.parent.name == "drafter":
        return drafter_class(yaml.safe_load(path.read_text())["kind"]).settings_class
    return RunSettings.model_fields[path.parent.name].annotation


@pytest.mark.parametrize("path", OPTIONS, ids=name_of)
def test_a_yaml_has_exactly_the_keys_of_its_settings(path):
    keys = yaml.safe_load(path.read_text()).keys()
    assert set(keys) == set(settings_class_of(path).model_fields)


@pytest.mark.parametrize("path", OPTIONS, ids=name_of)
def test_every_key_says_what_it_is(path):
    lines = [line for line in path.read_text().splitlines() if re.match(r"[a-z_]\w*:", line)]
    assert lines
    assert [line for line in lines if "#" not in line and not line.startswith("kind:")] == []


def test_settings_have_no_defaults_of_their_own():
    classes = {settings_class_of(path) for path in OPTIONS} | set(PRIMARIES.values())
    for cls in classes:
        assert [key for key, field in cls.model_fields.items() if not field.is_required()] == []


def test_every_drafter_kind_has_a_yaml_of_its_name():
    assert set(drafter_kinds()) <= {path.stem for path in (CONF / "drafter").glob("*.yaml")}


@pytest.mark.parametrize("primary", PRIMARIES)
def test_a_primary_composes_and_validates_without_words(primary):
    settings = settings_of(PRIMARIES[primary], compose(primary, []))
    assert settings.seed == 0


@pytest.mark.parametrize("path", OPTIONS, ids=name_of)
def test_every_option_composes_and_validates(path):
    composed = compose("train", [f"{path.parent.name}={path.stem}"])
    for key, value in flat_keys(composed.data).items():
        if value == "???":  # left open on purpose; text fits what must be typed
            node = composed.data
            *parents, last = key.split(".")
            for part in parents:
                node = node[part]
            node[last] = "given"
    settings = settings_of(RunSettings, composed)
    assert composed.choices[path.parent.name] == path.stem
    assert RunSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize("name", [path.stem for path in sorted((CONF / "debug").glob("*.yaml"))])
def test_every_debug_overlay_composes_and_validates(name):
    settings_of(RunSettings, compose("train", [f"debug={name}"]))


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes_and_validates(name):
    composed = compose("train", [f"recipe={name}"])
    open_keys = [key for key, value in flat_keys(composed.data).items() if value == "???"]
    words = [f"{key}=given" for key in open_keys]
    settings_of(RunSettings, compose("train", [f"recipe={name}", *words]))


def test_there_are_recipes():
    assert recipe_names()
