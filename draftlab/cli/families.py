"""The families that a bench goes through, each composed with the same words.

In: the words of a command line. Out: `Family`s. Which families there are is read from the recipes
for the demo target; other targets take every kind as its yaml has it.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from draftlab.cli.schema import RunSettings, settings_of
from draftlab.errors import ConfigError
from draftlab.settings.compose import compose, near_names
from draftlab.settings.locate import recipe_names, recipes_dir

_DEMO = "smollm2-demo"
_NOT_TRAINING = {"about", "resume", "eval", "export"}
_KIND = "override /drafter"
# where there is no recipe, what the recipes have in common
_LIKE_RECIPES = ("data=builtin", "regenerate=default", "optim=muon", "train=default")


@dataclass(frozen=True, slots=True)
class Family:
    """One family of a bench.

    Attributes:
        name: its kind of drafter; what tables call it.
        recipe: where its settings come from; None: from conf/drafter alone.
        settings: everything, composed.
    """

    name: str
    recipe: str | None
    settings: RunSettings

    @property
    def key(self) -> str:
        """Name and fingerprint of what a training depends on: a changed recipe is another one."""
        data = self.settings.model_dump(mode="json", exclude=_NOT_TRAINING)
        digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:6]}"


def known_families() -> dict[str, str]:
    """Map every kind of drafter that has a recipe for the demo target to that recipe."""
    found: dict[str, str] = {}
    for recipe in recipe_names():
        folder, _, last = recipe.rpartition("/")
        if last == _DEMO:
            data = yaml.safe_load((recipes_dir() / f"{recipe}.yaml").read_text(encoding="utf-8"))
            kinds = [entry[_KIND] for entry in data["defaults"] if _KIND in entry]
            found[kinds[0] if kinds and kinds[0] not in found else folder] = recipe
    return found


def compose_families(
    words: Sequence[str], *, presets: Sequence[str] = (), target: str = "demo"
) -> list[Family]:
    """Compose every family that the words ask for.

    Args:
        words: `families=[A,B]` chooses, all there are otherwise; `A.key=value` goes to family A
            alone, every other word to all.
        presets: words that recipes do not beat, and what is typed does.
        target: taken where no word says another.

    Raises:
        ConfigError: an unknown family, a recipe or drafter for all, or words that do not compose.
    """
    known = known_families()
    asked, rest = _take_families(words, known)
    for word in rest:
        if word.startswith(("recipe=", "drafter=", "init=", "resume=")):
            raise ConfigError(
                f"{word} cannot go to all families: each has its own recipe; choose with "
                f"families=[{','.join(asked)}]"
            )
    target = next((w.partition("=")[2] for w in reversed(rest) if w.startswith("target=")), target)
    families = []
    for name in asked:
        recipe = known[name] if target == "demo" else None
        chosen = [f"recipe={recipe}"] if recipe else [f"drafter={name}", *_LIKE_RECIPES]
        own = list(_words_for(name, rest, known))
        composed = compose("train", [*chosen, f"target={target}", *presets, *own])
        families.append(Family(name, recipe, settings_of(RunSettings, composed)))
    return families


def common_words(words: Sequence[str]) -> list[str]:
    """Give the words that go to all families."""
    known = known_families()
    _, rest = _take_families(words, known)
    return [word for word in rest if word.partition(".")[0] not in known]


def share(families: Sequence[Family], groups: Sequence[str]) -> tuple[list[Family], list[str]]:
    """Give all families the first one's choice of some groups.

    Args:
        families: at least one.
        groups: names of settings, such as "data".

    Returns:
        Families, and a line for each choice of a recipe that gave way.
    """
    first = families[0]
    common = {group: getattr(first.settings, group) for group in groups}
    shared, said = [], []
    for family in families:
        for group, value in common.items():
            mine = getattr(family.settings, group)
            if mine != value:
                said.append(
                    f"{family.name}: {group} as {first.name} has it ({_difference(mine, value)})"
                )
        shared.append(replace(family, settings=family.settings.model_copy(update=common)))
    return shared, said


def _take_families(words: Sequence[str], known: dict[str, str]) -> tuple[list[str], list[str]]:
    """Part the choice of families from the other words."""
    asked, rest = list(known), []
    folders = {recipe.partition("/")[0]: name for name, recipe in known.items()}
    for word in words:
        key, _, value = word.partition("=")
        if key != "families":
            rest.append(word)
            continue
        items = [item.strip() for item in value.strip("[]").split(",") if item.strip()]
        asked = [item if item in known else folders.get(item, item) for item in items]
        odd = [name for name in asked if name not in known]
        if odd or not asked or len(set(asked)) < len(asked):
            near = f"; near: {', '.join(near_names(odd[0], list(known)))}" if odd else ""
            raise ConfigError(
                f"{word}: expected different ones of {', '.join(known)}, such as "
                f"families=[eagle3,medusa]{near}"
            )
    return asked, rest


def _words_for(name: str, words: Sequence[str], known: dict[str, str]) -> Iterator[str]:
    for word in words:
        first, dot, rest = word.partition(".")
        if not dot or "=" in first or first not in known:
            yield word
        elif first == name:
            yield rest


def _difference(mine: Any, value: Any) -> str:
    if not hasattr(mine, "model_dump"):
        return f"{value}, not {mine}"
    ours, theirs = mine.model_dump(), value.model_dump()
    return ", ".join(
        f"{key}={theirs[key]}, not {ours[key]}" for key in ours if ours[key] != theirs[key]
    )
