"""`init=DRAFTER`: a drafter whose training goes on keeps its own settings and draft vocabulary.

Another vocabulary would give every output row another meaning (case O-19), and another shape has no
weights to start from. So a setting of the drafter that differs is refused, from its card alone.
"""

import logging
from collections.abc import Sequence
from typing import Any

from draftlab.cli.drafters import find_drafter_folder, may_be_hub_id
from draftlab.cli.schema import RunSettings, flat_keys, parse_drafter
from draftlab.drafters.base import DrafterSettings
from draftlab.drafters.store import read_card
from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.compose import Composed, compose

log = logging.getLogger(__name__)


def take_over_drafter(
    settings: RunSettings, composed: Composed, words: Sequence[str]
) -> RunSettings:
    """Give the settings with those of the drafter to start from; refuse others that are asked for.

    Asked for is what was typed, and what a recipe sets to something else than the kind's yaml. A
    hub id is downloaded by the worker; until then its settings are not known.

    Args:
        settings: of a training run, with init or without.
        composed: what they were made of.
        words: the command line.

    Raises:
        ConfigError: no such drafter, one of another kind, or drafter keys that differ from its own.
        CheckpointError: its folder is damaged.
    """
    name = settings.init
    if name is None:
        return settings
    typed = {word.partition("=")[0] for word in words if word.startswith("drafter.")}
    if may_be_hub_id(name):
        if typed:
            raise ConfigError(
                f"init={name} keeps its own settings and draft vocabulary, whatever they are; "
                f"drop {' '.join(sorted(typed))}{_ADVICE}"
            )
        return settings
    saved = read_card(find_drafter_folder(name)).settings
    require_kind(name, saved, settings.drafter)
    asked, kept = _flat(settings.drafter), _flat(saved)
    defaults = _flat(_settings_of_choice(composed.choices["drafter"]))
    wrong = [
        key
        for key, value in asked.items()
        if value != kept.get(key) and (key in typed or value != defaults.get(key))
    ]
    if wrong:
        told = ", ".join(f"{key}={_show(asked[key])} (it has {_show(kept[key])})" for key in wrong)
        from_recipe = "" if typed.issuperset(wrong) else " or take another recipe"
        raise ConfigError(
            f"init={name} keeps its own settings and draft vocabulary, but these are asked for: "
            f"{told}; drop {' '.join(wrong)}{from_recipe}{_ADVICE}"
        )
    return settings.model_copy(update={"drafter": saved})


def require_kind(init: str, saved: DrafterSettings, asked: DrafterSettings) -> None:
    """Refuse a drafter of another kind than the one asked for.

    Raises:
        ConfigError: with what to pass.
    """
    if saved.kind != asked.kind:
        raise ConfigError(
            f"init={init} is a drafter of kind {saved.kind}, but drafter={asked.kind}; pass "
            f"drafter={saved.kind}"
        )


def record_downloaded(run: RunDir, settings: RunSettings, own: DrafterSettings) -> None:
    """Write the settings of a drafter that came from the hub into the run's config.yaml."""
    assert settings.init is not None
    if not may_be_hub_id(settings.init) or own == settings.drafter:
        return
    asked, kept = _flat(settings.drafter), _flat(own)
    told = ", ".join(f"{k}={_show(v)}" for k, v in kept.items() if v != asked.get(k))
    log.info("init=%s keeps its own settings: %s", settings.init, told)
    true = settings.model_copy(update={"drafter": own})
    run.write_config(true.model_dump(mode="json"))


_ADVICE = (
    ", or drop init to train a new drafter (draft lengths may differ when decoding: "
    "decode.num_draft_tokens)"
)


def _flat(settings: DrafterSettings) -> dict[str, Any]:
    return flat_keys(settings.model_dump(mode="json"), "drafter.")


def _settings_of_choice(choice: str | None) -> DrafterSettings:
    return parse_drafter(compose("train", [f"drafter={choice}"]).data["drafter"])


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
