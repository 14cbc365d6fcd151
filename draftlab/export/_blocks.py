"""What block drafters write alike: a Qwen3-like network whose layers read the target's features.

Tap k is `k - 1` in `target_layer_ids`. A learned mask embedding has no tensor of its own in these
formats: the head then brings its own copy of the target's embedding, with the learned vector in the
row of the mask token. Read block_config.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftlab.drafters.base import ServingWeights
from draftlab.export._llama import (
    PLACES,
    SIZES,
    layer_shapes,
    list_llama_problems,
    llama_config,
    refuse,
)
from draftlab.export._words import tapped_limits
from draftlab.export.table import Row
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

BLOCK_KEYS = (
    SIZES
    | PLACES
    | {
        *("target_hidden_size", "draft_vocab_size", "num_target_layers", "tap_layers"),
        *("block_size", "causal", "sliding_window", "mask_token_id", "sample_from_anchor"),
    }
)
# families that scale their embedding, which vLLM's block networks read as it lies in the file
_SCALED_EMBEDDINGS = ("gemma", "granite", "minicpm")


def block_config(
    own: Mapping[str, Any],
    target: TargetView,
    training_length: int | None,
    network: str,
    problems: list[str],
) -> dict[str, Any]:
    """Write what DFlash and DSpark heads say alike.

    Args:
        own: the drafter's sizes and switches.
        target: which model it was made for.
        training_length: longest row it was trained on, tokens.
        network: vLLM's name for it.
        problems: what else it cannot compute.

    Raises:
        NotExportable: a value that vLLM's network cannot compute.
    """
    mask_id, window = own["mask_token_id"], own["sliding_window"]
    spare = _spare_row(target) if mask_id is None else mask_id
    problems = list_llama_problems(own) + problems
    if spare is None:
        problems.append(
            "mask_token_id=None; a learned mask embedding needs a row that answers never hold, and "
            f"the target's {own['vocab_size']} rows have no padding and no special token: train "
            "with drafter.mask_token_id=ID"
        )
    model_type = target.config["model_type"]
    if mask_id is not None and model_type.startswith(_SCALED_EMBEDDINGS):
        problems.append(
            f"mask_token_id={mask_id} with a target of type {model_type}; it would read that "
            "target's embedding without its scale: train with drafter.mask_token_id=null, and the "
            "head brings a scaled copy"
        )
    refuse(problems, network)
    attention: dict[str, Any] = {"causal": own["causal"], "use_swa": window is not None}
    if window is not None:
        attention["swa_window_size"] = window
    kind = "full_attention" if window is None else "sliding_attention"
    return {
        "model_type": "qwen3",
        **llama_config(own, target, training_length),
        **{key: own[key] for key in ("target_hidden_size", "draft_vocab_size", "block_size")},
        "num_target_layers": own["num_target_layers"],
        "target_layer_ids": [tap - 1 for tap in own["tap_layers"]],
        "mask_token_id": spare,
        "layer_types": [kind] * own["num_hidden_layers"],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "is_neox_style": True,
        "has_own_embedding": mask_id is None,
        "dflash_config": attention,
    }


def block_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any], mask_id: int
) -> dict[str, Tensor]:
    """Name the tensors as the file does; a whole vocabulary is read by the target's own head."""
    tensors = dict(serving.tensors)
    if config["draft_vocab_size"] == config["vocab_size"]:
        tensors.pop("lm_head.weight", None)
    mask = tensors.pop("mask_embedding", None)
    if config["has_own_embedding"]:
        assert mask is not None
        every = torch.arange(config["vocab_size"], device=mask.device)
        table = target.embed(every).detach().to(mask.dtype)
        table[mask_id] = mask
        tensors["embed_tokens.weight"] = table
    return tensors


def block_table(config: Mapping[str, Any], num_taps: int) -> dict[str, Row]:
    """List every tensor that the loaders of both kinds have a place for."""
    width, dtype = config["hidden_size"], config["dtype"]
    drafted, known = config["draft_vocab_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, num_taps * config["target_hidden_size"]),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(config["num_hidden_layers"]):
        name = f"layers.{i}"
        shapes |= layer_shapes(name, config)
        shapes[f"{name}.input_layernorm.weight"] = (width,)
        shapes[f"{name}.self_attn.q_norm.weight"] = (config["head_dim"],)
        shapes[f"{name}.self_attn.k_norm.weight"] = (config["head_dim"],)
    if config["has_own_embedding"]:
        shapes["embed_tokens.weight"] = (known, width)
    if drafted != known:
        shapes["lm_head.weight"] = (drafted, width)
    table = {name: Row(shape, dtype) for name, shape in shapes.items()}
    if drafted != known:
        table |= {"d2t": Row((drafted,), "int64"), "t2d": Row((known,), "bool")}
    return table


def block_limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None, num_drafts: int
) -> list[str]:
    """Say what holds for every block drafter.

    Args:
        config: config.json's content.
        target: which model it was made for.
        training_length: longest row it was trained on, tokens.
        num_drafts: draft tokens of a whole block.
    """
    limits = tapped_limits(config, target, training_length)
    if not config["dflash_config"]["causal"]:
        limits.append(
            f"Trained on blocks of {config['block_size']}: serve it with {num_drafts} draft "
            "tokens; with fewer, vLLM runs shorter blocks than it was trained on and accepts fewer."
        )
    if config["has_own_embedding"]:
        limits.append(
            "Its mask embedding is learned, so it carries a copy of the target's embedding with "
            "that row; other engines read the target's own and would draft worse."
        )
    return limits


def _spare_row(target: TargetView) -> int | None:
    """Find an id that no answer holds: a padding row, or the last special token but an end."""
    spec = target.spec
    if spec.num_token_ids < spec.vocab_size:
        return spec.vocab_size - 1
    added = target.tokenizer.added_tokens_decoder
    special = [i for i, token in added.items() if token.special and i not in spec.eos_ids]
    return max(special, default=None)
