"""Small pieces that drafters with layers of their own share: norm, rotary positions, MLP.

Trained modules come first, what decoding uses in their place after them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from draftlab.errors import UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView

Rope = Callable[[Tensor], tuple[Tensor, Tensor]]
Angles = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions to cos and signed sin


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a decoder layer like the target's own.

    Attributes:
        hidden: D, width of the residual stream.
        intermediate: width of the MLP.
        heads: query heads.
        kv_heads: key heads; divides `heads`.
        head_dim: width of a head.
        eps: of the norms.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float

    @classmethod
    def of(cls, config: dict[str, Any], intermediate: int | None = None) -> "LayerSizes":
        """Read the target's config; keys a family does not have mean what they mean for it."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden=hidden,
            intermediate=intermediate or config.get("intermediate_size") or 4 * hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            eps=config.get("rms_norm_eps") or 1e-5,
        )


class RMSNorm(nn.Module):
    """Scale to unit root mean square, computed in float32 or wider (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with a weight of ones."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Normalise the last axis; the result has the weight's dtype."""
        # one dtype on both sides, or torch leaves its fused kernel with a warning
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class SwiGLU(nn.Module):
    """Gated MLP: down(silu(gate x) * up x)."""

    is_recomputable = True  # a function of its input alone: see training/recompute.py

    def __init__(self, width: int, intermediate: int) -> None:
        """Make the three projections, without bias."""
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Apply the MLP."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_of(view: TargetView, head_dim: int) -> Rope:
    """Give the target's own rotary positions, so that scaling is never lost (case O-16).

    A target without rotary positions gets plain ones: base 10000, the whole head.
    """
    try:
        view.rope(torch.zeros(1, dtype=torch.int64, device=view.device))
    except UnsupportedTarget:
        return lambda positions: plain_rope(positions, head_dim)
    return view.rope


def plain_rope(
    positions: Int[Tensor, "*N"], width: int, base: float = 10000.0
) -> tuple[Float[Tensor, "*N width"], Float[Tensor, "*N width"]]:
    """Compute cos and sin of unscaled rotary positions, float32, rotate-half layout."""
    half = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angles = positions.to(torch.float32).unsqueeze(-1) / base**half
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def signed_sin(sin: Float[Tensor, "*N Dr"]) -> Float[Tensor, "*N Dr"]:
    """Negate the first half, so that a roll does for the rotation of halves."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat([-first, second], dim=-1)


def angles_of(view: TargetView, head_dim: int) -> Angles:
    """Give the target's rotary positions as `rotate` takes them."""
    rope = rope_of(view, head_dim)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope(positions)
        return cos, signed_sin(sin)

    return angles


def rotate(
    x: Float[Tensor, "*N H Dh"], cos: Float[Tensor, "*N Dr"], sin_signed: Float[Tensor, "*N Dr"]
) -> Float[Tensor, "*N H Dh"]:
    """Turn queries or keys by their positions; only the first Dr of Dh when Dr is smaller.

    Args:
        x: heads of every position.
        cos: as `TargetView.rope` gives it.
        sin_signed: its sin through `signed_sin`.
    """
    width = cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else x.split([width, x.shape[-1] - width], -1)
    turned = turned * cos.unsqueeze(-2) + turned.roll(width // 2, -1) * sin_signed.unsqueeze(-2)
    turned = turned.to(x.dtype)
    return turned if rest is None else torch.cat([turned, rest], dim=-1)


def fuse(*weights: Float[Tensor, "_ In"]) -> PackedLinear:
    """Stack projections of one input into one layer for decoding, laid out for this machine."""
    stacked = weights[0] if len(weights) == 1 else torch.cat(weights)
    return PackedLinear(stacked.detach(), None)


def layer_config(sizes: LayerSizes, target: TargetView) -> dict[str, Any]:
    """Tell an engine of decoder layers like the target's, under the names that all of them use."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "rope_parameters": target.config.get("rope_parameters")
        or {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": target.spec.max_positions,
        "vocab_size": target.spec.vocab_size,
    }
