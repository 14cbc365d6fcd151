"""EAGLE-3 as vLLM 0.32 loads it: names, config keys and the table that both must match.

Where engines disagree on a number, each gets its own key: tap k is `k` in vLLM's
`eagle_aux_hidden_state_layer_ids` at top level, and `k - 1` in SGLang's copy inside `eagle_config`.
"""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.export._layout import Layout, no_limit
from draftlab.export._llama import (
    PLACES,
    SIZES,
    check_vocab_map,
    layer_shapes,
    list_llama_problems,
    llama_config,
    refuse,
    with_head,
)
from draftlab.export._words import describe_head, tapped_limits
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
# what a drafter's config may say; a key that is not here would be lost on the way
EAGLE3_KEYS = (
    SIZES
    | PLACES
    | {*_SWITCHES, "target_hidden_size", "draft_vocab_size", "tap_layers", "sliding_window"}
)


def eagle3_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read.
    """
    check_known(serving.config, EAGLE3_KEYS, "vLLM's eagle3 loader")
    return tapped_config(serving.config, target, training_length)


def tapped_config(
    own: Mapping[str, Any], target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write what EAGLE-3 and P-EAGLE heads say alike.

    Raises:
        NotExportable: a value that vLLM's network cannot compute.
    """
    problems = list_llama_problems(own)
    if own["fc_norm"] and own["norm_before_fc"]:
        problems.append("fc_norm and norm_before_fc are both on; it has one or the other")
    problems += [
        f"{name}={own[name]!r} is no switch"
        for name in _SWITCHES
        if not isinstance(own[name], bool)
    ]
    refuse(problems, "eagle3")
    taps, window = list(own["tap_layers"]), own["sliding_window"]
    # without layer_types no layer slides, whatever the window
    sliding = {
        "layer_types": ["sliding_attention"] * own["num_hidden_layers"],
        "sliding_window": window,
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **llama_config(own, target, training_length),
        **{key: own[key] for key in (*_SWITCHES, "target_hidden_size", "draft_vocab_size")},
        **(sliding if window is not None else {}),
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": own["norm_before_fc"],
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
        },
    }


def eagle3_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does; the LM head is always among them."""
    del config
    return {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: t
        for name, t in with_head(serving, target).items()
    }


def eagle3_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's eagle3 loader has a place for, from config.json alone."""
    width, taps = config["hidden_size"], config["num_aux_hidden_states"]
    fused, drafted = taps * config["target_hidden_size"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, fused),
        "norm.weight": (width,),
        "lm_head.weight": (drafted, width),
        "midlayer.hidden_norm.weight": (width,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = "midlayer" if i == 0 else f"layers.{i}"
        # the first layer reads embedding and feature
        shapes |= layer_shapes(layer, config, 2 * width if i == 0 else width)
        shapes[f"{layer}.input_layernorm.weight"] = (width,)
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (fused,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (config["target_hidden_size"],) for i in range(taps)}
    table = {name: Row(shape, config["dtype"]) for name, shape in shapes.items()}
    if drafted != config["vocab_size"]:
        table["d2t"] = Row((drafted,), "int64")
        table["t2d"] = Row((config["vocab_size"],), "bool")
    return table


def _about(config: Mapping[str, Any]) -> str:
    taps = config["eagle_aux_hidden_state_layer_ids"]
    return describe_head("An EAGLE-3 draft head (arXiv:2503.01840)", config, taps) + "."


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    if config["norm_before_residual"] or config["num_hidden_layers"] > 1:
        note = (
            "Not for SGLang or TensorRT-LLM: they compute `norm_before_residual` and layers after "
            "the first otherwise."
        )
    elif config["eagle_aux_hidden_state_layer_ids"][-1] == target.spec.num_layers:
        note = "Not for SGLang: it cannot read the hidden state after the target's last layer."
    else:
        note = "SGLang finds its own layer numbers in `eagle_config`, but this was not run there."
    return [*tapped_limits(config, target, training_length), note]


EAGLE3 = Layout(
    method="eagle3",
    config=eagle3_config,
    tensors=eagle3_tensors,
    table=eagle3_table,
    check_ids=check_vocab_map,
    about=_about,
    limits=_limits,
    most_drafts=no_limit,
)
