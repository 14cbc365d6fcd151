"""DFlash as vLLM 0.32 loads it: block and mask in `dflash_config`, the first slot drafts nothing.

What it shares with DSpark stands in _blocks.py.
"""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.export._blocks import (
    BLOCK_KEYS,
    block_config,
    block_limits,
    block_table,
    block_tensors,
)
from draftlab.export._layout import Layout
from draftlab.export._llama import check_vocab_map
from draftlab.export._words import describe_head
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView


def dflash_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read, or a value it cannot compute.
    """
    own = serving.config
    check_known(own, BLOCK_KEYS, "vLLM's dflash loader")
    problems = []
    if own["sample_from_anchor"]:
        problems.append("sample_from_anchor=True; its first slot predicts nothing")
    config = block_config(own, target, training_length, "dflash", problems)
    config["dflash_config"] |= {
        key: config.pop(key) for key in ("target_layer_ids", "mask_token_id")
    }
    config["dflash_config"]["sample_from_anchor"] = False
    return {"architectures": ["DFlashDraftModel"], **config}


def dflash_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does."""
    return block_tensors(serving, target, config, config["dflash_config"]["mask_token_id"])


def dflash_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's dflash loader has a place for, from config.json alone."""
    return block_table(config, len(config["dflash_config"]["target_layer_ids"]))


def _about(config: Mapping[str, Any]) -> str:
    taps = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    head = describe_head("A DFlash block drafter (arXiv:2602.06036)", config, taps)
    return f"{head}; it fills a block of {config['block_size']} in one pass."


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    limits = block_limits(config, target, training_length, _most_drafts(config))
    if config["num_hidden_layers"] > 1:
        limits.append(
            "On CPUs, vLLM 0.32 norms the context's keys of every layer by the first one's weights "
            "and accepts slightly other drafts; GPUs were not tried."
        )
    return limits


def _most_drafts(config: Mapping[str, Any]) -> int:
    return config["block_size"] - 1


DFLASH = Layout(
    method="dflash",
    config=dflash_config,
    tensors=dflash_tensors,
    table=dflash_table,
    check_ids=check_vocab_map,
    about=_about,
    limits=_limits,
    most_drafts=_most_drafts,
)
