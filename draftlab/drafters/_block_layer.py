"""A decoder layer of a block drafter, and how blocks attend while training.

Read BlockLayer, then attend_blocks. The layer is Qwen3's (a norm on every query and key head), but
its keys and values come from two places: the target's fused features and the block itself, through
the same projections (DFlash, arXiv:2602.06036).
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from draftlab.drafters.layers import LayerSizes, RMSNorm, SwiGLU, rotate
from draftlab.shapes import Bool, Float, Tensor

# attention scores alive at once; more are computed piece by piece, and again for their gradient
_ALIVE = 200_000_000


class _Attention(nn.Module):
    """Projections and head norms of an attention."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.q_proj = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)
        self.q_norm = RMSNorm(sizes.head_dim, sizes.eps)
        self.k_norm = RMSNorm(sizes.head_dim, sizes.eps)


class BlockLayer(nn.Module):
    """A decoder layer whose blocks look at the target's features and at themselves."""

    is_recomputable = True  # a function of its inputs alone: see training/recompute.py

    def __init__(self, sizes: LayerSizes) -> None:
        """Make a layer of the given sizes."""
        super().__init__()
        self.sizes = sizes
        self.self_attn = _Attention(sizes)
        self.mlp = SwiGLU(sizes.hidden, sizes.intermediate)
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)

    def keys_values(
        self, x: Float[Tensor, "*N D"], cos: Float[Tensor, "*N Dr"], sin: Float[Tensor, "*N Dr"]
    ) -> tuple[Float[Tensor, "*N H Dh"], Float[Tensor, "*N H Dh"]]:
        """Project keys, normed and turned, and values; context features come without a norm."""
        attention, heads = self.self_attn, (-1, self.sizes.head_dim)
        keys = attention.k_norm(attention.k_proj(x).unflatten(-1, heads))
        return rotate(keys, cos, sin), attention.v_proj(x).unflatten(-1, heads)

    def forward(
        self,
        hidden: Float[Tensor, "B A S D"],
        context: tuple[Float[Tensor, "B T H Dh"], Float[Tensor, "B T H Dh"]],
        mask: Bool[Tensor, "B A _ T"],
        angles: tuple[Float[Tensor, "B A S Dr"], Float[Tensor, "B A S Dr"]],
        *,
        causal: bool,
    ) -> Float[Tensor, "B A S D"]:
        """Run A blocks of S slots a row.

        Args:
            hidden: residual stream of the blocks.
            context: keys and values of the target's features.
            mask: True where a block may look at a position; one row for all slots, or one a slot.
            angles: cos and signed sin of the slots' positions.
            causal: a slot sees only the slots up to itself.
        """
        attention = self.self_attn
        x = self.input_layernorm(hidden)
        queries = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, self.sizes.head_dim)))
        own = self.keys_values(x, *angles)
        mixed = attend_blocks(rotate(queries, *angles), context, own, mask, causal=causal)
        hidden = hidden + attention.o_proj(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def attend_blocks(
    queries: Float[Tensor, "B A S Hq Dh"],
    context: tuple[Float[Tensor, "B T H Dh"], Float[Tensor, "B T H Dh"]],
    own: tuple[Float[Tensor, "B A S H Dh"], Float[Tensor, "B A S H Dh"]],
    mask: Bool[Tensor, "B A _ T"],
    *,
    causal: bool,
) -> Float[Tensor, "B A S HqDh"]:
    """Attend as blocks do: to the context before their anchor and to themselves, to no other block.

    What a block sees of itself is a product per block, not part of a matrix over all blocks.

    Args:
        queries: of all slots of all blocks.
        context: keys and values of positions.
        own: keys and values of the blocks.
        mask: True where a block may look at a position; none is fine.
        causal: a slot sees only the slots up to itself.
    """
    batch, blocks, slots, heads, _ = queries.shape
    scores = batch * heads * blocks * slots * (mask.shape[-1] + slots)
    pieces = min(math.ceil(scores / _ALIVE), blocks)
    if pieces == 1:
        return _attend(queries, *context, *own, mask, causal)
    parts = [
        checkpoint(_attend, q, *context, k, v, m, causal, use_reentrant=False)
        for q, k, v, m in zip(
            queries.chunk(pieces, 1),
            own[0].chunk(pieces, 1),
            own[1].chunk(pieces, 1),
            mask.chunk(pieces, 1),
            strict=True,
        )
    ]
    return torch.cat(parts, dim=1)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    mask: Tensor,
    causal: bool,
) -> Tensor:
    _, blocks, slots, _, width = queries.shape
    kv_heads, length = keys.shape[2], keys.shape[1]
    shape = (-1, blocks, slots)
    grouped = queries.unflatten(3, (kv_heads, -1)).permute(0, 3, 4, 1, 2, 5)  # B H G A S Dh
    grouped = grouped * width**-0.5
    past = (grouped.flatten(2, 4) @ keys.permute(0, 2, 3, 1)).unflatten(2, shape)
    past = past.masked_fill(~mask[:, None, None], -torch.inf)
    near = grouped @ own_keys.permute(0, 3, 1, 4, 2).unsqueeze(2)  # B H G A S S
    if causal:
        seen = torch.ones(slots, slots, dtype=torch.bool, device=near.device).tril()
        near = near.masked_fill(~seen, -torch.inf)
    scores = torch.cat([past, near], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    far, close = scores.softmax(-1, dtype=wide).to(values.dtype).split([length, slots], dim=-1)
    mixed = (far.flatten(2, 4) @ values.transpose(1, 2)).unflatten(2, shape)
    mixed = mixed + close @ own_values.permute(0, 3, 1, 2, 4).unsqueeze(2)
    return mixed.permute(0, 3, 4, 1, 2, 5).flatten(3)
