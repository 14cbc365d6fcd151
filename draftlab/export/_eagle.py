"""EAGLE-1 as vLLM 0.32 loads it: embedding and LM head are always the target's.

Its first layer has no norm before attention, and there is no norm at the end.
"""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.export._layout import Layout, no_ids, no_limit
from draftlab.export._llama import (
    PLACES,
    SIZES,
    layer_shapes,
    list_head_problems,
    list_llama_problems,
    llama_config,
    refuse,
    without_head,
)
from draftlab.export._words import describe_head, final_state_limits
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_KNOWN = SIZES | PLACES | {"fc_bias", "draft_vocab_size", "sliding_window"}


def eagle_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read, or a value it cannot compute.
    """
    own = serving.config
    check_known(own, _KNOWN, "vLLM's eagle loader")
    problems = list_llama_problems(own) + list_head_problems(own)
    if own["fc_bias"]:
        problems.append("fc_bias=True; it joins without a bias: train with drafter.fc_bias=false")
    if own["sliding_window"] is not None:
        problems.append(
            f"sliding_window={own['sliding_window']}; it looks back on everything: train with "
            "drafter.sliding_window=null, or an eagle3 head"
        )
    refuse(problems, "eagle")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **llama_config(own, target, training_length),
    }


def eagle_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does."""
    del target, config
    return without_head(serving)


def eagle_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's eagle loader has a place for, from config.json alone."""
    width = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    for i in range(config["num_hidden_layers"]):
        shapes |= layer_shapes(f"layers.{i}", config)
        if i > 0:
            shapes[f"layers.{i}.input_layernorm.weight"] = (width,)
    return {name: Row(shape, config["dtype"]) for name, shape in shapes.items()}


def _about(config: Mapping[str, Any]) -> str:
    return describe_head("An EAGLE draft head (arXiv:2401.15077)", config, None) + "."


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    del config
    return [
        *final_state_limits("eagle", "scale its embedding or its logits", target, training_length),
        "Not for SGLang: its loader wants `fc.bias` and another architecture name.",
    ]


EAGLE = Layout(
    method="eagle",
    config=eagle_config,
    tensors=eagle_tensors,
    table=eagle_table,
    check_ids=no_ids,
    about=_about,
    limits=_limits,
    most_drafts=no_limit,
)
