"""From a command line to plain data: Hydra chooses and merges yaml, and does nothing else.

In: the name of a primary config and `key=value` words. Out: `Composed`, plain dicts and scalars.
Read first: compose, then _split_word.

Only the names of choices (`target=tiny`, `recipe=smoke/tiny`) meet Hydra's grammar. A value is
swapped for a placeholder that Hydra carries through merging and interpolation, and swapped back in
the result, so any text or path can be typed as it is.
"""

import csv
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftlab.errors import ConfigError
from draftlab.settings.locate import conf_dir, recipe_names, recipes_dir

# a word typed for one of these is a sentence: never a list, a null or a path
_SENTENCE_KEYS = frozenset({"prompt", "system"})
# a group whose value may also name a thing on disk or on a hub: a run, an exported folder
_REFERENCE_GROUPS = frozenset({"drafter"})
_KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


@dataclass(frozen=True, slots=True)
class Composed:
    """What a command line means, before it is checked.

    Attributes:
        data: every key of the primary config and its groups, resolved. Typed values are text here;
            Settings turn them into numbers and switches.
        choices: group -> chosen option, such as {"target": "tiny"}; None where nothing is chosen.
        recipe: family/name or the stem of a recipe file; None without one.
    """

    data: dict[str, Any]
    choices: dict[str, str | None]
    recipe: str | None


def compose(primary: str, words: Sequence[str], *, conf: Path | None = None) -> Composed:
    """Compose a primary config with the words of a command line.

    Args:
        primary: a yaml of conf/ without its ending, such as "train".
        words: `key=value` words; a later word beats an earlier one.
        conf: folder to compose from; the shipped one when None.

    Raises:
        ConfigError: a word that is not key=value, an unknown key, choice or recipe (with near
            names), or yaml that cannot be read.
    """
    conf = conf or conf_dir()
    typed, values = _sort_words(words, _groups_of(conf, primary))
    choices, references = _resolve_choices(typed, conf)
    overrides = [f"{group}={'null' if name is None else name}" for group, name in choices.items()]
    if values:
        _check_keys(values, _run_hydra(conf, primary, overrides)[0], references)
    tokens = {f"draftlab_value_{i}_end": value for i, value in enumerate(values.values())}
    overrides += [f"++{key}={token}" for key, token in zip(values, tokens, strict=True)]
    data, chosen = _run_hydra(conf, primary, overrides)
    data = {**_put_back(data, tokens), **references}
    if recipe := typed.get("recipe"):
        _leave_open(data, _read_yaml(_find_recipe(recipe)[1]), values)
    return Composed(
        data=data,
        choices={**chosen, **references},
        recipe=choices.get("recipe"),
    )


def expand_home(text: str) -> str:
    """Replace a leading ~ by the home folder; other text stays as it is."""
    return str(Path(text).expanduser()) if text == "~" or text.startswith("~/") else text


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Give the up to three known names that look most like `name`, best first."""
    return difflib.get_close_matches(name, known, n=3, cutoff=0.0)


def check_recipe_name(name: str) -> None:
    """Refuse a recipe that does not exist.

    Raises:
        ConfigError: with the three nearest names.
    """
    known = recipe_names()
    if name in known:
        return
    near = ", ".join(near_names(name, known)) or "none are installed"
    raise ConfigError(
        f"unknown recipe {name!r}; nearest: {near}; `draftlab recipes` lists all, and a path to a "
        "yaml file works as well"
    )


def _sort_words(
    words: Sequence[str], groups: Sequence[str]
) -> tuple[dict[str, str | None], dict[str, Any]]:
    choices: dict[str, str | None] = {}
    values: dict[str, Any] = {}
    for word in words:
        key, text = _split_word(word)
        if key in groups:
            choices[key] = None if text == "null" else text
        else:
            values.pop(key, None)  # the last word decides, and keeps its place
            values[key] = _parse_value(key, text)
    return choices, values


def _split_word(word: str) -> tuple[str, str]:
    if word in ("-m", "--multirun"):
        raise ConfigError(
            "sweeps (-m) are not available; start one run per value, for example in a shell loop"
        )
    key, equals, text = word.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise ConfigError(
            f"cannot read {word!r}; expected key=value, such as optim.lr=1e-4 or target=tiny"
        )
    return key, text


def _parse_value(key: str, text: str) -> Any:
    """Text stays text; `null` is nothing; brackets hold a list of texts."""
    if key.rpartition(".")[2] in _SENTENCE_KEYS:
        return text
    if text == "null":
        return None
    if not (text.startswith("[") and text.endswith("]")):
        return expand_home(text)
    items = next(csv.reader([text[1:-1]], skipinitialspace=True), [])
    if any(item.count("[") != item.count("]") or item.startswith("[") for item in items):
        raise ConfigError(
            f"cannot read {key}={text}; expected a flat list such as [a,b], with double quotes "
            'around an item that holds a comma: ["a,b",c]'
        )
    return [expand_home(item.strip()) for item in items]


def _resolve_choices(
    typed: Mapping[str, str | None], conf: Path
) -> tuple[dict[str, str | None], dict[str, str]]:
    """Part options of conf/ from references to trained things, and refuse what is neither."""
    choices: dict[str, str | None] = {}
    references: dict[str, str] = {}
    for group, name in typed.items():
        if name is None:
            choices[group] = None
        elif group == "recipe":
            choices[group] = _store_recipe(name)
        elif group in _REFERENCE_GROUPS and _is_reference(name, _options(conf, group)):
            references[group] = expand_home(name)
        else:
            _check_option(group, name, _options(conf, group))
            choices[group] = name
    return choices, references


def _groups_of(conf: Path, primary: str) -> list[str]:
    path = conf / f"{primary}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in conf.glob("*.yaml")))
        raise ConfigError(f"no primary config {primary!r} in {conf}; known: {known}")
    groups: list[str] = []
    for entry in _read_yaml(path).get("defaults", []):
        if isinstance(entry, dict):
            groups += [key.removeprefix("override ").lstrip("/") for key in entry]
        elif entry != "_self_":
            groups += _groups_of(conf, entry)
    return groups


def _options(conf: Path, group: str) -> list[str]:
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))


def _is_reference(name: str, options: Sequence[str]) -> bool:
    return name not in options and ("/" in name or Path(name).exists())


def _check_option(group: str, name: str, options: Sequence[str]) -> None:
    if name in options:
        return
    extra = ", or a run, an exported folder or a hub id" if group in _REFERENCE_GROUPS else ""
    raise ConfigError(
        f"unknown choice {group}={name}; nearest: {', '.join(near_names(name, options))}; "
        f"known: {', '.join(options)}{extra}"
    )


def _store_recipe(name: str) -> str:
    """Give the recipe to Hydra under the name it is chosen by."""
    from hydra.core.config_store import ConfigStore

    name, path = _find_recipe(name)
    family, _, last = name.rpartition("/")
    group = f"recipe/{family}" if family else "recipe"
    ConfigStore.instance().store(
        group=group, name=last, node=_read_yaml(path), package="_global_", provider="draftlab"
    )
    return name


def _find_recipe(name: str) -> tuple[str, Path]:
    """Give the name that Hydra knows a recipe by, and its file."""
    if not name.endswith((".yaml", ".yml")):
        check_recipe_name(name)
        return name, recipes_dir() / f"{name}.yaml"
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(f"no recipe file {path}; `draftlab recipes` lists the shipped ones")
    return re.sub(r"[^\w.-]", "_", path.stem), path


def _leave_open(
    data: dict[str, Any], recipe: Mapping[str, Any], typed: Mapping[str, Any], prefix: str = ""
) -> None:
    """Mark what a recipe wants to be given: merging keeps the older value where it says ???."""
    for key, value in recipe.items():
        here = data.get(key)
        if value == "???" and f"{prefix}{key}" not in typed:
            data[key] = value
        elif isinstance(value, Mapping) and isinstance(here, dict):
            _leave_open(here, value, typed, f"{prefix}{key}.")


def _read_yaml(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:  # OmegaConf's loader, as Hydra's: plain yaml 1.1 takes 1e-4 for text
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path} as yaml: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}; expected keys and values")
    return {str(key): value for key, value in data.items()}


def _run_hydra(
    conf: Path, primary: str, overrides: list[str]
) -> tuple[dict[str, Any], dict[str, str | None]]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(conf.resolve()), version_base="1.3", job_name="draftlab"):
            config = hydra_compose(primary, overrides=overrides, return_hydra_config=True)
        chosen = dict(config.hydra.runtime.choices)
        OmegaConf.set_struct(config, False)
        del config["hydra"]
        data = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot compose {primary}: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{primary}.yaml holds {type(data).__name__}; expected keys and values")
    # Hydra tells them last first
    choices = {g: chosen[g] for g in reversed(list(chosen)) if not g.startswith("hydra/")}
    return {str(key): value for key, value in data.items()}, choices


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _check_keys(
    values: dict[str, Any], data: Mapping[str, Any], references: Mapping[str, str]
) -> None:
    """Refuse keys that are not in the composed yaml: every key stands there with its default."""
    for key, value in values.items():
        group = key.partition(".")[0]
        if group in references:
            raise ConfigError(
                f"{key} cannot be set: {group}={references[group]} names a trained {group}, whose "
                "settings are its own"
            )
        default = _lookup(key, data)
        if default is _FREE:  # no Settings field will say what the text means
            values[key] = yaml.safe_load(value) if isinstance(value, str) else value
        elif isinstance(default, Mapping):
            below = ", ".join(f"{key}.{name}" for name in default) or f"{key}.NAME"
            raise ConfigError(f"{key}={value} cannot be set as a whole; set one of: {below}")


_FREE = object()


def _lookup(key: str, data: Mapping[str, Any]) -> Any:
    """Find a key's default; `_FREE` below an empty mapping, which takes any key."""
    here: Any = data
    parts = key.split(".")
    for i, part in enumerate(parts):
        if here == {}:
            return _FREE
        if not isinstance(here, Mapping) or part not in here:
            prefix = ".".join(parts[:i])
            if not isinstance(here, Mapping):
                raise ConfigError(f"unknown key {key}; {prefix} has no keys below it")
            known = sorted(map(str, here))
            near = difflib.get_close_matches(part, known, n=3)
            near = [f"{prefix}.{name}".lstrip(".") for name in near]
            if part == parts[-1]:  # the same key of another group is what was meant
                near = _keys_named(part, data)[:3] or near
            names = ", ".join(near or (f"{prefix}.{name}".lstrip(".") for name in known))
            raise ConfigError(f"unknown key {key}; {'nearest' if near else 'known'}: {names}")
        here = here[part]
    return here


def _keys_named(name: str, data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the dotted keys whose last part is `name`."""
    found: list[str] = []
    for key, value in data.items():
        if key == name and prefix:
            found.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found += _keys_named(name, value, f"{prefix}{key}.")
    return found


def _put_back(node: Any, tokens: Mapping[str, Any]) -> Any:
    """Swap placeholders for the values they stand for, also inside interpolated text."""
    if isinstance(node, dict):
        return {key: _put_back(value, tokens) for key, value in node.items()}
    if isinstance(node, list):
        return [_put_back(value, tokens) for value in node]
    if not isinstance(node, str) or "draftlab_value_" not in node:
        return node
    if node in tokens:
        return tokens[node]
    return re.sub(r"draftlab_value_\d+_end", lambda m: str(tokens.get(m[0], m[0])), node)
