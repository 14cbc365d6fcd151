"""P-EAGLE as vLLM 0.32 loads it: an EAGLE-3 head with what stands in the place of unknown rows."""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.export._eagle3 import EAGLE3_KEYS, eagle3_table, eagle3_tensors, tapped_config
from draftlab.export._layout import Layout
from draftlab.export._llama import check_vocab_map
from draftlab.export._words import describe_head, tapped_limits
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView


def peagle_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read.
    """
    own = serving.config
    check_known(own, EAGLE3_KEYS | {"mask_token_id", "num_depths"}, "vLLM's parallel eagle3 loader")
    return {
        **tapped_config(own, target, training_length),
        "mask_token_id": own["mask_token_id"],
        "num_depths": own["num_depths"],
    }


def peagle_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does."""
    tensors = eagle3_tensors(serving, target, config)
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    return tensors


def peagle_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's loader has a place for, from config.json alone."""
    fused = config["num_aux_hidden_states"] * config["target_hidden_size"]
    return eagle3_table(config) | {"mask_hidden": Row((1, 1, fused), config["dtype"])}


def _about(config: Mapping[str, Any]) -> str:
    taps = config["eagle_aux_hidden_state_layer_ids"]
    head = describe_head("A P-EAGLE draft head (arXiv:2602.01469)", config, taps)
    return f"{head}; it drafts all tokens in one pass."


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    return [
        *tapped_limits(config, target, training_length),
        f"Trained for at most {config['num_depths']} draft tokens a step.",
        "No other engine serves P-EAGLE heads.",
    ]


def _most_drafts(config: Mapping[str, Any]) -> int:
    return config["num_depths"]


PEAGLE = Layout(
    method="eagle3",
    config=peagle_config,
    tensors=peagle_tensors,
    table=peagle_table,
    check_ids=check_vocab_map,
    about=_about,
    limits=_limits,
    most_drafts=_most_drafts,
    options={"parallel_drafting": True},
)
