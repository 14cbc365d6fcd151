"""What a kind of head must say to be written for vLLM: one `Layout` beside its functions.

Read Layout; `_eagle3.py` is the longest example, `_eagle.py` the shortest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.export.table import Row
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView


@dataclass(frozen=True, slots=True)
class Layout:
    """How a head's config.json and tensors are made, checked and served.

    Attributes:
        method: vLLM's word for it.
        config: config.json's content, from the drafter, its target and the longest row it was
            trained on (tokens, None when unknown); refuses what vLLM cannot compute.
        tensors: the file's names, given that config.
        table: every tensor that vLLM's loader has a place for, from the config alone.
        check_ids: compares maps of ids with the target.
        about: what the network is, in a sentence.
        limits: what a user must know before serving it.
        most_drafts: largest K, or None.
        options: further keys of --speculative-config.
        overrides: keys that the target's config must have, for --hf-overrides.
    """

    method: str
    config: Callable[[ServingWeights, TargetView, int | None], dict[str, Any]]
    tensors: Callable[[ServingWeights, TargetView, Mapping[str, Any]], dict[str, Tensor]]
    table: Callable[[Mapping[str, Any]], dict[str, Row]]
    check_ids: Callable[[Mapping[str, Tensor], TargetView], None]
    about: Callable[[Mapping[str, Any]], str]
    limits: Callable[[Mapping[str, Any], TargetView, int | None], list[str]]
    most_drafts: Callable[[Mapping[str, Any]], int | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


def no_limit(config: Mapping[str, Any]) -> None:
    """Say that any K can be served."""
    del config


def no_ids(tensors: Mapping[str, Tensor], target: TargetView) -> None:
    """Say that there is no map of ids to check."""
    del tensors, target
