"""What every head built of Llama-like decoder layers writes alike: sizes, rotary keys, layer rows.

Read llama_config, then layer_shapes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftlab.drafters.base import ServingWeights
from draftlab.errors import NotExportable
from draftlab.export.table import dtype_name, serving_dtype
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

# what a drafter's config says of its layers; the same words in config.json
SIZES = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "attention_bias",
        "tie_word_embeddings",
    }
)
# said by every such drafter, but not copied as they are
PLACES = frozenset({"rope_parameters", "max_position_embeddings"})
# longrope changes its table with the length served, dynamic with the length reached
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def llama_config(
    own: Mapping[str, Any], target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write dtype, sizes and positions.

    Args:
        own: the drafter's sizes and switches.
        target: which model it was made for.
        training_length: longest row it was trained on, tokens; never the limit of positions
            (case O-35).
    """
    rope = dict(own["rope_parameters"])
    rope.setdefault("rope_type", "default")
    config: dict[str, Any] = {"dtype": dtype_name(serving_dtype(target.dtype))}
    config |= {key: own[key] for key in sorted(SIZES)}
    config |= {
        "mlp_bias": False,
        "max_position_embeddings": max(
            own["max_position_embeddings"], target.spec.max_positions, training_length or 0
        ),
        # both spellings: readers that know one fall back to another base without it
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return config


def list_llama_problems(own: Mapping[str, Any]) -> list[str]:
    """List what vLLM's Llama-like layers cannot compute of these sizes and switches."""
    rope_type = own["rope_parameters"].get("rope_type", "default")
    problems = []
    if own["hidden_act"] != "silu":
        problems.append(f"hidden_act={own['hidden_act']!r}; it has silu")
    if own["attention_bias"]:
        problems.append("attention_bias=True; draftlab writes no biases")
    if own["tie_word_embeddings"]:
        problems.append("tie_word_embeddings=True; the head has rows of its own")
    if rope_type not in _ROPE_TYPES:
        problems.append(f"rope_type={rope_type!r}; expected one of {', '.join(_ROPE_TYPES)}")
    return problems


def refuse(problems: list[str], network: str) -> None:
    """Refuse a drafter for what a network cannot compute.

    Raises:
        NotExportable: naming all of it.
    """
    if problems:
        raise NotExportable(
            f"vLLM's {network} network cannot compute this drafter: {'; '.join(problems)}"
        )


def layer_shapes(
    name: str, config: Mapping[str, Any], read: int | None = None
) -> dict[str, tuple[int, ...]]:
    """List the matrices and the second norm of a decoder layer.

    Args:
        name: of the layer.
        config: config.json's content.
        read: width that attention reads; None is the residual stream's.
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    columns = width if read is None else read
    return {
        f"{name}.self_attn.q_proj.weight": (queries, columns),
        f"{name}.self_attn.k_proj.weight": (keys, columns),
        f"{name}.self_attn.v_proj.weight": (keys, columns),
        f"{name}.self_attn.o_proj.weight": (width, queries),
        f"{name}.mlp.gate_proj.weight": (inner, width),
        f"{name}.mlp.up_proj.weight": (inner, width),
        f"{name}.mlp.down_proj.weight": (width, inner),
        f"{name}.post_attention_layernorm.weight": (width,),
    }


def list_head_problems(own: Mapping[str, Any]) -> list[str]:
    """List what a network that reads the target's whole LM head cannot do: a draft vocabulary."""
    if own["draft_vocab_size"] in (None, own["vocab_size"]):
        return []
    return [
        f"draft_vocab_size={own['draft_vocab_size']}; it reads the target's whole head: train with "
        "drafter.draft_vocab_size=null"
    ]


def without_head(serving: ServingWeights) -> dict[str, Tensor]:
    """Give the tensors without an LM head, which is the target's, and without a map to itself."""
    # a draft vocabulary of every token is no map; the config has checked that it is
    return {n: t for n, t in serving.tensors.items() if n not in {"lm_head.weight", "token_map"}}


def with_head(serving: ServingWeights, target: TargetView) -> dict[str, Tensor]:
    """Give the tensors with an LM head among them: the target's when the drafter has none."""
    tensors = dict(serving.tensors)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.head_rows(None)
    return tensors


def check_vocab_map(tensors: Mapping[str, Tensor], target: TargetView) -> None:
    """Check that both maps of a reduced vocabulary say the same, and that answers can end.

    Raises:
        NotExportable: what does not fit.
    """
    if "d2t" not in tensors:
        return
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    ids = d2t + torch.arange(d2t.shape[0])
    if not torch.equal(ids, t2d.nonzero().squeeze(1)):
        raise NotExportable(
            "d2t and t2d disagree: expected i + d2t[i] to be the i-th True of t2d, ids ascending"
        )
    missing = [i for i in target.spec.eos_ids if not bool(t2d[i])]
    if missing:
        raise NotExportable(
            f"the draft vocabulary lacks the end tokens {missing}: no answer's end could be "
            "drafted; train with a vocabulary that holds them"
        )
