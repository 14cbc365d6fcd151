"""Medusa as vLLM 0.32 loads it: native names, and the table that files must match.

vLLM's reader folds any config key that holds "num" and "heads" or "layers" into its own two counts,
and ignores tensors it has no place for, so nothing but the keys below is written at top level.
"""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.errors import NotExportable
from draftlab.export._layout import Layout, no_ids
from draftlab.export.table import Row, check_known, dtype_name, serving_dtype
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_KNOWN = frozenset(
    {
        "num_heads",
        "num_blocks",
        "hidden_size",
        "vocab_size",
        "has_bias",
        "has_shared_head",
        "draft_vocab_size",
    }
)


def medusa_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read, or heads that it cannot load.
    """
    del training_length  # no head looks at positions
    own = serving.config
    check_known(own, _KNOWN, "vLLM's medusa loader")
    size = own["draft_vocab_size"]
    if size is not None and size != target.spec.vocab_size:
        raise NotExportable(
            f"draft_vocab_size={size}: vLLM 0.32 refuses every Medusa checkpoint with a token_map "
            "(it reports the map as not loaded); train with drafter.draft_vocab_size=null"
        )
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "dtype": dtype_name(serving_dtype(target.dtype)),
        "num_heads": own["num_heads"],
        "num_hidden_layers": own["num_blocks"],
        "hidden_size": own["hidden_size"],
        # the target's, or vLLM overwrites the reduced size
        "vocab_size": target.spec.vocab_size,
        # false by default, and then the biases are dropped in silence
        "medusa_fc_bias": own["has_bias"],
    }
    if own["has_shared_head"]:
        config["original_lm_head"] = True
    return config


def medusa_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does."""
    del target, config
    # a map of every token says nothing
    return {name: t for name, t in serving.tensors.items() if name != "token_map"}


def medusa_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's medusa loader has a place for, from config.json alone."""
    dtype, width = config["dtype"], config["hidden_size"]
    rows = config["vocab_size"]
    table: dict[str, Row] = {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            table[f"blocks.{i}.layers.{j}.weight"] = Row((width, width), dtype)
            if config["medusa_fc_bias"]:
                table[f"blocks.{i}.layers.{j}.bias"] = Row((width,), dtype)
        if not config.get("original_lm_head"):
            table[f"lm_heads.{i}.weight"] = Row((rows, width), dtype)
    if config.get("original_lm_head"):
        table["lm_head.weight"] = Row((rows, width), dtype)
    return table


def _about(config: Mapping[str, Any]) -> str:
    return (
        f"{config['num_heads']} Medusa heads (arXiv:2401.10774) over the target's final hidden "
        "state."
    )


def _most_drafts(config: Mapping[str, Any]) -> int:
    return config["num_heads"]


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    del target, training_length
    return [
        "vLLM drafts a chain of the likeliest token of each head, no tree.",
        f"At most {config['num_heads']} draft tokens a step: one a head.",
        "No other engine serves Medusa heads.",
    ]


MEDUSA = Layout(
    method="medusa",
    config=medusa_config,
    tensors=medusa_tensors,
    table=medusa_table,
    check_ids=no_ids,
    about=_about,
    limits=_limits,
    most_drafts=_most_drafts,
)
