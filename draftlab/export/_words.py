"""What model cards of several kinds of heads say alike: what they read, and what limits them.

Read describe_head, then tapped_limits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from draftlab.targets.view import TargetView

# families whose hidden states vLLM 0.32 hands to a head, of those draftlab knows
_TAPPED_TARGETS = (
    *("afmoe", "apertus", "deepseek_v2", "deepseek_v3", "gemma4", "gpt_oss", "granite", "llama"),
    *("minicpm", "minimax_m2", "mistral", "mistral3", "nemotron_h", "qwen2", "qwen2_5_vl"),
    *("qwen3", "qwen3_5", "qwen3_moe", "qwen3_next", "qwen3_vl"),
)


def describe_head(what: str, config: Mapping[str, Any], taps: Sequence[int] | None) -> str:
    """Say what a head is made of, as the beginning of a sentence.

    Args:
        what: its name, article and paper included.
        config: config.json's content.
        taps: that it reads; None for the final hidden state.
    """
    read = "final hidden state" if taps is None else f"hidden states after layers {list(taps)}"
    return f"{what} of {config['num_hidden_layers']} decoder layer(s) over the target's {read}"


def tapped_limits(
    config: Mapping[str, Any], target: TargetView, training_length: int | None
) -> list[str]:
    """Say what holds for every head that reads several of the target's layers."""
    limits = []
    model_type = target.config["model_type"]
    if model_type not in _TAPPED_TARGETS:
        limits.append(
            f"Targets of type `{model_type}` are not among those whose hidden states vLLM 0.32 "
            "hands to a head: check your version before relying on it."
        )
    limits += training_limits(training_length)
    if config.get("sliding_window") is not None:
        limits.append(
            f"It looks back on {config['sliding_window']} positions, itself included, and so does "
            "vLLM; other engines were not tried and may look back on all."
        )
    if config["draft_vocab_size"] != config["vocab_size"]:
        limits.append(
            f"It can say {config['draft_vocab_size']} of the target's {config['vocab_size']} "
            "tokens; the others always come from the target itself."
        )
    return limits


def final_state_limits(
    network: str, otherwise: str, target: TargetView, training_length: int | None
) -> list[str]:
    """Say what holds for every head that continues the target's final hidden state.

    Args:
        network: vLLM's, that computes it.
        otherwise: what other families may do and this network does not.
        target: the head's.
        training_length: longest row it was trained on, tokens.
    """
    limits = training_limits(training_length)
    if target.config["model_type"] != "llama":
        limits.append(
            f"Run in vLLM with Llama targets only: another family may {otherwise}, which vLLM's "
            f"{network} network does not."
        )
    return limits


def training_limits(training_length: int | None) -> list[str]:
    """Say how long its training rows were."""
    if training_length is None:
        return []
    return [
        f"Trained on rows of at most {training_length} tokens; beyond that fewer drafts may be "
        "accepted."
    ]
