"""A decoder layer of a block drafter.

The layer is Qwen3's (a norm on every query and key head), but its keys and values come from two
places: the target's fused features and the block itself, through the same projections (DFlash,
arXiv:2602.06036). How blocks attend while training is in _training_attention.py.
"""

from torch import nn

from draftlab.drafters._spans import Spans
from draftlab.drafters._training_attention import attend_blocks
from draftlab.drafters.layers import LayerSizes, RMSNorm, SwiGLU, rotate
from draftlab.shapes import Float, Tensor


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
        spans: Spans,
        angles: tuple[Float[Tensor, "B A S Dr"], Float[Tensor, "B A S Dr"]],
        *,
        causal: bool,
    ) -> Float[Tensor, "B A S D"]:
        """Run A blocks of S slots a row.

        Args:
            hidden: residual stream of the blocks.
            context: keys and values of the target's features.
            spans: which positions a slot sees, block after block.
            angles: cos and signed sin of the slots' positions.
            causal: a slot sees only the slots up to itself.
        """
        attention = self.self_attn
        x = self.input_layernorm(hidden)
        queries = attention.q_norm(attention.q_proj(x).unflatten(-1, (-1, self.sizes.head_dim)))
        own = self.keys_values(x, *angles)
        mixed = attend_blocks(rotate(queries, *angles), context, own, spans, causal=causal)
        hidden = hidden + attention.o_proj(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
