"""Medusa as vLLM 0.32 loads it: native names, and the table that files must match.

vLLM's reader folds any config key that holds "num" and "heads" or "layers" into its own two counts,
and ignores tensors it has no place for, so nothing but the keys below is written at top level.
"""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.errors import NotExportable
from draftlab.export._layout import Layout
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
    size = own["draft_vocab_size"]
    if size is not None and size != target.spec.vocab_size:
        if not own["has_shared_head"]:
            raise NotExportable(
                f"draft_vocab_size={size} with a matrix a head: vLLM 0.32 makes such matrices for "
                f"all {target.spec.vocab_size} tokens and loads no smaller ones; train with "
                "drafter.head=tied, or with drafter.draft_vocab_size=null"
            )
        config["truncated_vocab_size"] = size
    return config


def medusa_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does."""
    del target
    tensors = dict(serving.tensors)
    if "truncated_vocab_size" not in config:
        tensors.pop("token_map", None)
    return tensors


def medusa_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's medusa loader has a place for, from config.json alone."""
    dtype, width = config["dtype"], config["hidden_size"]
    rows = config.get("truncated_vocab_size", config["vocab_size"])
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
    if "truncated_vocab_size" in config:
        table["token_map"] = Row((rows,), "int64")
    return table


def check_token_map(tensors: Mapping[str, Tensor], target: TargetView) -> None:
    """Check that a reduced vocabulary holds absolute ids, ascending, the end tokens among them.

    Raises:
        NotExportable: what does not fit.
    """
    if "token_map" not in tensors:
        return
    ids = tensors["token_map"].tolist()
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= target.spec.num_token_ids:
        raise NotExportable(
            f"token_map holds {len(ids)} ids in {min(ids)}..{max(ids)}: expected ascending, unique "
            f"target ids in 0..{target.spec.num_token_ids - 1}"
        )
    missing = sorted(set(target.spec.eos_ids) - set(ids))
    if missing:
        raise NotExportable(
            f"token_map lacks the end tokens {missing}: no answer's end could be drafted; train "
            "with a vocabulary that holds them"
        )


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
    limits = [
        "vLLM drafts a chain of the likeliest token of each head, no tree.",
        f"At most {config['num_heads']} draft tokens a step: one a head.",
        "No other engine serves Medusa heads.",
    ]
    if "truncated_vocab_size" in config:
        limits.append(
            f"The heads can say {config['truncated_vocab_size']} of the target's "
            f"{config['vocab_size']} tokens; the others always come from the target itself."
        )
    return limits


MEDUSA = Layout(
    method="medusa",
    config=medusa_config,
    tensors=medusa_tensors,
    table=medusa_table,
    check_ids=check_token_map,
    about=_about,
    limits=_limits,
    most_drafts=_most_drafts,
)
