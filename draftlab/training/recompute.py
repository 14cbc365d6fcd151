"""Gradient checkpointing: activations are computed once more in the backward pass, not kept.

A module that says `is_recomputable` is a function of its inputs and weights alone: it changes no
memory and draws nothing, so running it twice gives the same bits. Such modules are wrapped where
they stand; names of weights, checkpoints and decoding stay as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from draftlab.drafters.base import Drafter
from draftlab.errors import ConfigError


def recompute_layers(drafter: Drafter) -> int:
    """Let a drafter's layers forget their activations while it trains.

    Returns:
        How many modules were wrapped.

    Raises:
        ConfigError: the drafter has no layer that allows it.
    """
    outer: list[str] = []
    for name, module in drafter.named_modules():
        is_inside = any(name.startswith(f"{above}.") for above in outer)
        if getattr(module, "is_recomputable", False) and not is_inside:
            outer.append(name)
            module.forward = partial(_run, module, module.forward)
    if not outer:
        raise ConfigError(
            f"train.gradient_checkpointing=true has no effect on drafter kind {drafter.kind!r}: it "
            "has no layer that can be computed twice; pass train.gradient_checkpointing=false"
        )
    return len(outer)


def _run(module: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if module.training and torch.is_grad_enabled():
        return checkpoint(forward, *inputs, use_reentrant=False, **options)
    return forward(*inputs, **options)
