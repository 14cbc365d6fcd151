"""EAGLE-3 as vLLM 0.32 loads it: names, config keys and the table that both must match.

Where engines disagree on a number, each gets its own key: tap k is `k` in vLLM's
`eagle_aux_hidden_state_layer_ids` at top level, and `k - 1` in SGLang's copy inside `eagle_config`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftlab.drafters.base import ServingWeights
from draftlab.errors import NotExportable
from draftlab.export.table import Row, check_known, dtype_name, serving_dtype
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

# what a drafter's config may say; a key that is not here would be lost on the way
_KNOWN = frozenset(
    {
        "hidden_size",
        "target_hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "vocab_size",
        "draft_vocab_size",
        "tap_layers",
        "fc_norm",
        "norm_before_fc",
        "norm_output",
        "norm_before_residual",
        "attention_bias",
        "tie_word_embeddings",
    }
)
_SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
_COPIED = _KNOWN - {"tap_layers", "rope_parameters", "max_position_embeddings"}
# longrope changes its table with the length served, dynamic with the length reached
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# families whose hidden states vLLM 0.32 hands to an EAGLE-3 head, of those draftlab knows
_SERVED_TARGETS = (
    *("afmoe", "apertus", "deepseek_v2", "deepseek_v3", "gemma4", "gpt_oss", "granite", "llama"),
    *("minicpm", "minimax_m2", "mistral", "mistral3", "nemotron_h", "qwen2", "qwen2_5_vl"),
    *("qwen3", "qwen3_5", "qwen3_moe", "qwen3_next", "qwen3_vl"),
)


def eagle3_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Args:
        serving: the drafter's sizes and switches.
        target: which model it was made for.
        training_length: longest row it was trained on, tokens; its own key, never the limit of
            positions (case O-35).

    Raises:
        NotExportable: a switch that vLLM does not read.
    """
    own = serving.config
    check_known(own, _KNOWN, "vLLM's eagle3 loader")
    _check_served(own)
    taps = list(own["tap_layers"])
    rope = dict(own["rope_parameters"])
    rope.setdefault("rope_type", "default")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": dtype_name(serving_dtype(target.dtype)),
    }
    config |= {key: own[key] for key in sorted(_COPIED)}
    config |= {
        "mlp_bias": False,
        "max_position_embeddings": max(
            own["max_position_embeddings"], target.spec.max_positions, training_length or 0
        ),
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "norm_before_fc": own["norm_before_fc"],
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
        },
        # both spellings: readers that know one fall back to 10000 without it
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return config


def eagle3_tensors(serving: ServingWeights, target: TargetView) -> dict[str, Tensor]:
    """Name the tensors as the file does; the LM head is always among them."""
    tensors = {
        f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name: t
        for name, t in serving.tensors.items()
    }
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.head_rows(None)
    return tensors


def eagle3_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's eagle3 loader has a place for, from config.json alone."""
    dtype = config["dtype"]
    width, taps = config["hidden_size"], config["num_aux_hidden_states"]
    fused = taps * config["target_hidden_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    inner, drafted = config["intermediate_size"], config["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, fused),
        "norm.weight": (width,),
        "lm_head.weight": (drafted, width),
    }
    for i in range(config["num_hidden_layers"]):
        layer = "midlayer" if i == 0 else f"layers.{i}"
        read = 2 * width if i == 0 else width  # the first layer reads embedding and feature
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (queries, read),
            f"{layer}.self_attn.k_proj.weight": (keys, read),
            f"{layer}.self_attn.v_proj.weight": (keys, read),
            f"{layer}.self_attn.o_proj.weight": (width, queries),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.post_attention_layernorm.weight": (width,),
        }
    shapes["midlayer.hidden_norm.weight"] = (width,)
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (fused,)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (config["target_hidden_size"],) for i in range(taps)}
    table = {name: Row(shape, dtype) for name, shape in shapes.items()}
    if drafted != config["vocab_size"]:
        table["d2t"] = Row((drafted,), "int64")
        table["t2d"] = Row((config["vocab_size"],), "bool")
    return table


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


def eagle3_limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    """Say what a user must know before serving an EAGLE-3 head."""
    limits = []
    model_type = target.config["model_type"]
    if model_type not in _SERVED_TARGETS:
        limits.append(
            f"Targets of type `{model_type}` are not among those whose hidden states vLLM 0.32 "
            "hands to an EAGLE-3 head: check your version before relying on it."
        )
    if training_length is not None:
        limits.append(
            f"Trained on rows of at most {training_length} tokens; beyond that fewer drafts may be "
            "accepted."
        )
    if config["draft_vocab_size"] != config["vocab_size"]:
        limits.append(
            f"It can say {config['draft_vocab_size']} of the target's {config['vocab_size']} "
            "tokens; the others always come from the target itself."
        )
    if config["norm_before_residual"] or config["num_hidden_layers"] > 1:
        note = (
            "Not for SGLang or TensorRT-LLM: they compute `norm_before_residual` and layers after "
            "the first otherwise."
        )
    elif config["eagle_aux_hidden_state_layer_ids"][-1] == target.spec.num_layers:
        note = "Not for SGLang: it cannot read the hidden state after the target's last layer."
    else:
        note = "SGLang finds its own layer numbers in `eagle_config`, but this was not run there."
    return [*limits, note]


def _check_served(config: Mapping[str, Any]) -> None:
    """Refuse what vLLM's eagle3 network cannot compute."""
    rope_type = config["rope_parameters"].get("rope_type", "default")
    problems = []
    if config["fc_norm"] and config["norm_before_fc"]:
        problems.append("fc_norm and norm_before_fc are both on; it has one or the other")
    if config["hidden_act"] != "silu":
        problems.append(f"hidden_act={config['hidden_act']!r}; it has silu")
    if config["attention_bias"]:
        problems.append("attention_bias=True; draftlab writes no biases")
    if config["tie_word_embeddings"]:
        problems.append("tie_word_embeddings=True; the head has rows of its own")
    if rope_type not in _ROPE_TYPES:
        problems.append(f"rope_type={rope_type!r}; expected one of {', '.join(_ROPE_TYPES)}")
    problems += [
        f"{name}={config[name]!r} is no switch"
        for name in _SWITCHES
        if not isinstance(config[name], bool)
    ]
    if problems:
        raise NotExportable(
            f"vLLM's eagle3 network cannot compute this drafter: {'; '.join(problems)}"
        )
