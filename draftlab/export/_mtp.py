"""A module of multi-token prediction as vLLM 0.32 loads it: MiMo's class, beside a Llama target.

vLLM builds that class by the target's config, so the module's sizes must be the target's own, and
that config must say that there is one such module: `--hf-overrides` in the serve command adds the
key. The file also holds embedding and LM head, which the loader insists on; served, both are the
target's own.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftlab.drafters._mtp_layout import MIMO_PREFIX, to_mimo
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
from draftlab.export._words import final_state_limits
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_COUNT = "num_nextn_predict_layers"
_OF_THE_TARGET = frozenset({"num_hidden_layers", "tie_word_embeddings"})
_KNOWN = (SIZES - _OF_THE_TARGET) | PLACES | {"draft_vocab_size", "hidden_first", _COUNT}
_BIASED = ("q_proj", "k_proj", "v_proj")


def mtp_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: sizes other than the target's, or a switch that vLLM does not read.
    """
    own = serving.config
    check_known(own, _KNOWN, "vLLM's MiMo loader")
    # biases and the order of halves are no matter of this network: both are written as it has them
    sizes = own | {
        "num_hidden_layers": target.spec.num_layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    problems = list_llama_problems(sizes) + list_head_problems(own)
    width, inner = own["hidden_size"], target.config.get("intermediate_size")
    if own["num_attention_heads"] * own["head_dim"] != width:
        problems.append(
            f"head_dim={own['head_dim']}; it takes hidden_size / num_attention_heads = "
            f"{width / own['num_attention_heads']:g}: train an eagle3 head for this target"
        )
    if own["intermediate_size"] != inner:
        problems.append(
            f"intermediate_size={own['intermediate_size']}; it has the target's {inner}: train "
            "with drafter.intermediate_size=null"
        )
    refuse(problems, "MiMo")
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        **llama_config(sizes, target, training_length),
        "attention_bias": True,
        _COUNT: 1,
    }


def mtp_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does: hidden state first, zero biases where there are none."""
    own = without_head(serving)
    if not serving.config["hidden_first"]:
        own["eh_proj.weight"] = torch.cat(own["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    for name in _BIASED:
        matrix = own[f"layer.self_attn.{name}.weight"]
        own.setdefault(f"layer.self_attn.{name}.bias", matrix.new_zeros(matrix.shape[0]))
    every = torch.arange(config["vocab_size"], device=own["eh_proj.weight"].device)
    return {
        **to_mimo(own),
        "model.embed_tokens.weight": target.embed(every).detach(),
        "lm_head.weight": target.head_rows(None),
    }


def mtp_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's MiMo loader has a place for, from config.json alone."""
    width, rows = config["hidden_size"], config["vocab_size"]
    shapes = layer_shapes(MIMO_PREFIX.removesuffix("."), config)
    for name in _BIASED:
        weight = shapes[f"{MIMO_PREFIX}self_attn.{name}.weight"]
        shapes[f"{MIMO_PREFIX}self_attn.{name}.bias"] = weight[:1]
    for name in ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"):
        shapes[f"{MIMO_PREFIX}{name}.weight"] = (width,)
    shapes[f"{MIMO_PREFIX}input_proj.weight"] = (width, 2 * width)
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"] = (rows, width)
    return {name: Row(shape, config["dtype"]) for name, shape in shapes.items()}


def _about(config: Mapping[str, Any]) -> str:
    del config
    return (
        "A module of multi-token prediction (arXiv:2412.19437, 2509.18362) over the target's final "
        "hidden state, applied again and again, in MiMo's layout."
    )


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    del config
    otherwise = "scale its embedding or its logits, or look back over a window"
    return [
        *final_state_limits("MiMo", otherwise, target, training_length),
        f"The target's config must say `{_COUNT}: 1`, or vLLM cannot build the module; the command "
        "above adds it.",
        "It carries a copy of the target's embedding and LM head, because the loader refuses a "
        "file without them.",
    ]


MTP = Layout(
    method="mtp",
    config=mtp_config,
    tensors=mtp_tensors,
    table=mtp_table,
    check_ids=no_ids,
    about=_about,
    limits=_limits,
    most_drafts=no_limit,
    overrides={_COUNT: 1},
)
