"""DFlash as vLLM 0.32 loads it: a Qwen3-like network whose layers read the target's features.

Tap k is `k - 1` in `target_layer_ids`. A learned mask embedding has no tensor name of its own in
the format, only a pickled file, and we write none: the head then brings its own copy of the
target's embedding, with the learned vector in the row of the mask token.
"""

from collections.abc import Mapping
from typing import Any

import torch

from draftlab.drafters.base import ServingWeights
from draftlab.export._layout import Layout
from draftlab.export._llama import (
    PLACES,
    SIZES,
    check_vocab_map,
    layer_shapes,
    list_llama_problems,
    llama_config,
    refuse,
    tapped_limits,
)
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_KNOWN = (
    SIZES
    | PLACES
    | {
        *("target_hidden_size", "draft_vocab_size", "num_target_layers", "tap_layers"),
        *("block_size", "causal", "sliding_window", "mask_token_id", "sample_from_anchor"),
    }
)


def dflash_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read, or a value it cannot compute.
    """
    own = serving.config
    check_known(own, _KNOWN, "vLLM's dflash loader")
    mask_id = own["mask_token_id"]
    spare = _spare_row(target) if mask_id is None else mask_id
    problems = list_llama_problems(own)
    if own["sample_from_anchor"]:
        problems.append("sample_from_anchor=True; its first slot predicts nothing")
    if spare is None:
        problems.append(
            "mask_token_id=None; a learned mask embedding needs a row that answers never hold, and "
            f"the target's {own['vocab_size']} rows have no padding and no special token: train "
            "with drafter.mask_token_id=ID"
        )
    refuse(problems, "dflash")
    dflash: dict[str, Any] = {
        "mask_token_id": spare,
        "target_layer_ids": [tap - 1 for tap in own["tap_layers"]],
        "causal": own["causal"],
        "use_swa": own["sliding_window"] is not None,
        "sample_from_anchor": False,
    }
    kind = "full_attention"
    if own["sliding_window"] is not None:
        kind, dflash["swa_window_size"] = "sliding_attention", own["sliding_window"]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **llama_config(own, target, training_length),
        **{key: own[key] for key in ("target_hidden_size", "draft_vocab_size", "block_size")},
        "num_target_layers": own["num_target_layers"],
        "layer_types": [kind] * own["num_hidden_layers"],
        "sliding_window": own["sliding_window"],
        "use_sliding_window": own["sliding_window"] is not None,
        "is_neox_style": True,
        "has_own_embedding": mask_id is None,
        "dflash_config": dflash,
    }


def dflash_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
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
        table[config["dflash_config"]["mask_token_id"]] = mask
        tensors["embed_tokens.weight"] = table
    return tensors


def dflash_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's dflash loader has a place for, from config.json alone."""
    width, dtype = config["hidden_size"], config["dtype"]
    taps = len(config["dflash_config"]["target_layer_ids"])
    drafted, known = config["draft_vocab_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, taps * config["target_hidden_size"]),
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


def _spare_row(target: TargetView) -> int | None:
    """Find an id that no answer holds: a padding row, or the last special token but an end."""
    spec = target.spec
    if spec.num_token_ids < spec.vocab_size:
        return spec.vocab_size - 1
    added = target.tokenizer.added_tokens_decoder
    special = [i for i, token in added.items() if token.special and i not in spec.eos_ids]
    return max(special, default=None)


def _about(config: Mapping[str, Any]) -> str:
    taps = [i + 1 for i in config["dflash_config"]["target_layer_ids"]]
    return (
        f"A DFlash block drafter (arXiv:2602.06036) of {config['num_hidden_layers']} decoder "
        f"layer(s) over the target's hidden states after layers {taps}; it fills a block of "
        f"{config['block_size']} in one pass."
    )


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    limits = tapped_limits(config, target, training_length)
    if not config["dflash_config"]["causal"]:
        limits.append(
            f"Trained on blocks of {config['block_size']}: serve it with "
            f"{config['block_size'] - 1} draft tokens; with fewer, vLLM runs shorter blocks than "
            "it was trained on and accepts fewer."
        )
    if config["num_hidden_layers"] > 1:
        limits.append(
            "On CPUs, vLLM 0.32 norms the context's keys of every layer by the first one's weights "
            "and accepts slightly other drafts; GPUs were not tried."
        )
    if config["has_own_embedding"]:
        limits.append(
            "Its mask embedding is learned, so it carries a copy of the target's embedding with "
            "that row; other engines read the target's own and would draft worse."
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
