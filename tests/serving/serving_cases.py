"""Which heads are served, and which mistakes in an export must show.

Every mistake is one that vLLM loads without a word, or refuses by naming it; all were seen in the
wild (see the notes in draftlab/export).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Head:
    """A drafter, how long to train it, the K it is served with, and mistakes to make.

    `start` changes its weights before it is trained; `head_dim` is the target's; `runner` is vLLM's
    model runner that serves it, the first or the second.
    """

    kind: str
    steps: int
    depth: int
    keys: dict[str, Any] = field(default_factory=dict)
    start: Callable[[torch.nn.Module], None] | None = None
    head_dim: int = 64
    runner: str = "first"
    mistakes: dict[str, Callable[[Path], None]] = field(default_factory=dict)


def in_config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return make


def in_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)

    return make


def _swap_halves(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, dim=1)[::-1], dim=1)


def _swap_module_halves(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.mtp_layers.0.input_proj.weight"
    tensors[name] = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1)


def _make_absolute(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"] = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).clamp_max(23)


def _shift_taps(config: dict[str, Any]) -> None:
    config["eagle_aux_hidden_state_layer_ids"] = [
        tap - 1 for tap in config["eagle_aux_hidden_state_layer_ids"]
    ]


def _shift_block_taps(config: dict[str, Any]) -> None:
    ids = config["dflash_config"]["target_layer_ids"]
    config["dflash_config"]["target_layer_ids"] = [i - 1 for i in ids]


def _shift_spark_taps(config: dict[str, Any]) -> None:
    config["target_layer_ids"] = [i - 1 for i in config["target_layer_ids"]]


def _bias_blocks(drafter: torch.nn.Module) -> None:
    """Give the biases weight: trained for seconds from zero, they hardly matter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        for name, parameter in drafter.named_parameters():
            if name.startswith("blocks.") and name.endswith(".bias"):
                parameter.normal_(std=1.0)


TAPS = [2, 3, 5]
# one layer: vLLM 0.32's CPU build norms the context's keys of every layer by the first one's weights,
# found by replaying two-layer heads so, which gives its counters exactly
BLOCK = {"num_layers": 1, "block_size": 5, "num_draft_tokens": 4, "tap_layers": TAPS}
SPARK = BLOCK | {"block_size": 4, "markov_rank": 16}

METHODS: dict[str, dict[str, Head]] = {
    "medusa": {
        "plain": Head(
            "medusa",
            steps=60,
            depth=4,
            start=_bias_blocks,
            mistakes={"no_bias": in_config(lambda c: c.pop("medusa_fc_bias"))},
        ),
    },
    "eagle": {
        "plain": Head(
            "eagle", steps=45, depth=3, mistakes={"halves_swapped": in_tensors(_swap_halves)}
        ),
        "two_layers": Head("eagle", steps=40, depth=3, keys={"num_layers": 2}),
    },
    "eagle3": {
        "plain": Head(
            "eagle3",
            steps=45,
            depth=4,
            keys={"tap_layers": TAPS},
            mistakes={
                "taps_off_by_one": in_config(_shift_taps),
                "no_output_norm": in_config(lambda c: c.update(norm_output=False)),
                "extra_tensor": in_tensors(lambda t: t.update({"foo.weight": torch.ones(2)})),
            },
        ),
        "reduced": Head(
            "eagle3",
            steps=45,
            depth=3,
            keys={
                "draft_vocab_size": 40,
                "tap_layers": [1, 6],
                "norm_before_residual": True,
                "fc_norm": False,
                "norm_output": False,
            },
            mistakes={
                "no_head": in_tensors(lambda t: t.pop("lm_head.weight")),
                "absolute_ids": in_tensors(_make_absolute),
            },
        ),
        "window": Head(
            "eagle3",
            steps=45,
            depth=4,
            keys={"tap_layers": TAPS, "num_layers": 2, "sliding_window": 6},
            mistakes={"no_window": in_config(lambda c: c.pop("layer_types"))},
        ),
    },
    "peagle": {
        "plain": Head(
            "peagle",
            steps=60,
            depth=4,
            keys={"num_layers": 2, "num_depths": 4, "num_draft_tokens": 4, "tap_layers": TAPS},
            mistakes={
                "other_mask_token": in_config(lambda c: c.update(mask_token_id=5)),
                "mask_of_zeros": in_tensors(lambda t: t["mask_hidden"].zero_()),
            },
        ),
        "window": Head(
            "peagle",
            steps=60,
            depth=4,
            keys={
                "num_layers": 2,
                "num_depths": 4,
                "num_draft_tokens": 4,
                "tap_layers": TAPS,
                "sliding_window": 7,
            },
        ),
    },
    "dflash": {
        "learned_mask": Head(
            "dflash",
            steps=60,
            depth=4,
            keys=BLOCK,
            mistakes={
                "no_mask_embedding": in_tensors(lambda t: t.pop("embed_tokens.weight")),
                "taps_off_by_one": in_config(_shift_block_taps),
            },
        ),
        "causal_window": Head(
            "dflash",
            steps=60,
            depth=3,
            keys=BLOCK | {"causal": True, "sliding_window": 12, "mask_token_id": 62},
        ),
    },
    "dspark": {
        "learned_mask": Head(
            "dspark",
            steps=60,
            depth=4,
            keys=SPARK,
            runner="second",
            mistakes={
                "anchor_drafts_nothing": in_config(lambda c: c.update(sample_from_anchor=False)),
                "no_markov_head": in_tensors(lambda t: t["markov_head.markov_w2.weight"].zero_()),
                "taps_off_by_one": in_config(_shift_spark_taps),
            },
        ),
        "causal_window": Head(
            "dspark",
            steps=60,
            depth=3,
            keys=SPARK
            | {
                "causal": True,
                "sliding_window": 12,
                "mask_token_id": 62,
                "draft_vocab_size": 40,
                "markov_table": False,
                "confidence_weight": 0.0,
            },
            runner="second",
            mistakes={"absolute_ids": in_tensors(_make_absolute)},
        ),
    },
    "mtp": {
        # MiMo's class has heads of hidden_size / num_attention_heads
        "plain": Head(
            "mtp",
            steps=45,
            depth=3,
            head_dim=32,
            mistakes={"halves_swapped": in_tensors(_swap_module_halves)},
        ),
    },
    "draft_model": {
        "plain": Head(
            "draft_model",
            steps=40,
            depth=3,
            keys={"layers": [0, 5]},
            mistakes={
                "other_rotary_base": in_config(
                    lambda c: c.update(rope_parameters={"rope_type": "default", "rope_theta": 9.0})
                )
            },
        ),
    },
}
HEADS = [(method, name) for method, heads in METHODS.items() for name in heads]
MISTAKES = [
    (method, name, mistake)
    for method, heads in METHODS.items()
    for name, head in heads.items()
    for mistake in head.mistakes
]
