"""DSpark as vLLM 0.32 loads it: DFlash's network, with a Markov head and a confidence head.

Every slot drafts, the anchor's the first token, so a block of N is served with N draft tokens. The
Markov head is two matrices over the vocabulary: a row of r numbers for every target id, and what
they add to the logit of every draft token. What it shares with DFlash stands in _blocks.py.
"""

from collections.abc import Mapping
from typing import Any

from draftlab.drafters.base import ServingWeights
from draftlab.export._blocks import (
    BLOCK_KEYS,
    block_config,
    block_limits,
    block_table,
    block_tensors,
)
from draftlab.export._layout import Layout
from draftlab.export._llama import check_vocab_map
from draftlab.export._words import describe_head
from draftlab.export.table import Row, check_known
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_PLACES = {
    "markov_in.weight": "markov_head.markov_w1.weight",
    "markov_out.weight": "markov_head.markov_w2.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}


def dspark_config(
    serving: ServingWeights, target: TargetView, training_length: int | None
) -> dict[str, Any]:
    """Write config.json's content.

    Raises:
        NotExportable: a switch that vLLM does not read, or a value it cannot compute.
    """
    own = serving.config
    check_known(own, BLOCK_KEYS | {"markov_rank", "has_confidence"}, "vLLM's dspark loader")
    problems = []
    if not own["sample_from_anchor"]:
        problems.append("sample_from_anchor=False; every slot of a block drafts")
    return {
        "architectures": ["Qwen3DSparkModel"],
        **block_config(own, target, training_length, "dspark", problems),
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "markov_rank": own["markov_rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": own["has_confidence"],
        # false by default: it would then read the hidden state alone
        "confidence_head_with_markov": own["has_confidence"],
    }


def dspark_tensors(
    serving: ServingWeights, target: TargetView, config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Name the tensors as the file does."""
    tensors = block_tensors(serving, target, config, config["mask_token_id"])
    return {_PLACES.get(name, name): tensor for name, tensor in tensors.items()}


def dspark_table(config: Mapping[str, Any]) -> dict[str, Row]:
    """List every tensor that vLLM's dspark loader has a place for, from config.json alone."""
    rank, dtype = config["markov_rank"], config["dtype"]
    table = block_table(config, len(config["target_layer_ids"]))
    table["markov_head.markov_w1.weight"] = Row((config["vocab_size"], rank), dtype)
    table["markov_head.markov_w2.weight"] = Row((config["draft_vocab_size"], rank), dtype)
    if config["enable_confidence_head"]:
        read = config["hidden_size"] + rank
        table["confidence_head.proj.weight"] = Row((1, read), dtype)
        table["confidence_head.proj.bias"] = Row((1,), dtype)
    return table


def _about(config: Mapping[str, Any]) -> str:
    taps = [i + 1 for i in config["target_layer_ids"]]
    head = describe_head("A DSpark block drafter (arXiv:2607.05147)", config, taps)
    return (
        f"{head}; it fills a block of {config['block_size']} in one pass, and a Markov head of "
        f"rank {config['markov_rank']} tells every token the one before it."
    )


def _limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    limits = [
        *block_limits(config, target, training_length, _most_drafts(config)),
        "vLLM 0.32 serves it by its second model runner, on GPUs; draftlab compared tokens and "
        "acceptances with that runner's on a CPU, in Triton's interpreter.",
    ]
    if config["enable_confidence_head"]:
        limits.append(
            "Its confidence head is asked only with `enable_adaptive_verification` in "
            "--speculative-config."
        )
    return limits


def _most_drafts(config: Mapping[str, Any]) -> int:
    return config["block_size"]


DSPARK = Layout(
    method="dspark",
    config=dspark_config,
    tensors=dspark_tensors,
    table=dspark_table,
    check_ids=check_vocab_map,
    about=_about,
    limits=_limits,
    most_drafts=_most_drafts,
)
