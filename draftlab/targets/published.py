"""What is published about the models that recipes name: sizes, licence, and who must ask for them.

The facts in published_models.json are those of the models' own cards and config files, so that a
run can be estimated where no hub is in reach. Nothing is ever loaded by them. No torch here.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("published_models.json")


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Facts about one model of the hub.

    Attributes:
        licence: what it is called.
        is_gated: True where the hub gives it only to those who accepted the licence there.
        stored: what the weights are stored in: a dtype, or the name of a quantisation.
        num_parameters: all of them, those of a vision tower included.
        config: sizes and switches, under the names of the model's config.json.
    """

    licence: str
    is_gated: bool
    stored: str
    num_parameters: int
    config: dict[str, Any]


def published_model(name: str | None) -> PublishedModel | None:
    """Find a model by its hub id; None for one that no recipe names."""
    return published_models().get(name or "")


@cache
def published_models() -> dict[str, PublishedModel]:
    """Read all of them, by hub id."""
    data = json.loads(_FILE.read_text(encoding="utf-8"))
    return {name: PublishedModel(**facts) for name, facts in data.items()}
