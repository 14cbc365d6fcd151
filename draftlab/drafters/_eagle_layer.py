"""A decoder layer of an EAGLE head: as a trained module, and as decoding runs it over its memory.

Read EagleLayer, then decode_layer.
"""

from dataclasses import dataclass

import torch
from torch import nn

from draftlab.drafters.layers import LayerSizes, RMSNorm, SwiGLU, fuse, rotate
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.attention import attend, tile_mask
from draftlab.targets.cache import KVBuffers
from draftlab.targets.packing import PackedLinear


class _Attention(nn.Module):
    """The projections of an attention; how they meet differs between training and decoding."""

    def __init__(self, sizes: LayerSizes, width_in: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width_in, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(width_in, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(width_in, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)


class EagleLayer(nn.Module):
    """A decoder layer; the first one reads embedding and hidden state side by side."""

    def __init__(self, sizes: LayerSizes, *, is_first: bool, norm_before_residual: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm_before_residual = norm_before_residual
        self.self_attn = _Attention(sizes, 2 * sizes.hidden if is_first else sizes.hidden)
        self.mlp = SwiGLU(sizes.hidden, sizes.intermediate)
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps)
        self.hidden_norm = RMSNorm(sizes.hidden, sizes.eps) if is_first else None
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)

    def read(
        self, embedded: Float[Tensor, "*N D"], hidden: Float[Tensor, "*N D"]
    ) -> tuple[Float[Tensor, "*N In"], Float[Tensor, "*N D"]]:
        """Give the attention's input and the residual."""
        if self.hidden_norm is None:
            return self.input_layernorm(hidden), hidden
        normed = self.hidden_norm(hidden)
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return joined, normed if self.norm_before_residual else hidden

    def queries(
        self, x: Float[Tensor, "B A In"], cos: Float[Tensor, "B A Dr"], sin: Float[Tensor, "B A Dr"]
    ) -> Float[Tensor, "B A Hq Dh"]:
        """Project and turn queries."""
        return rotate(self.self_attn.q_proj(x).unflatten(-1, (-1, self.sizes.head_dim)), cos, sin)

    def keys_values(
        self, x: Float[Tensor, "B T In"], cos: Float[Tensor, "B T Dr"], sin: Float[Tensor, "B T Dr"]
    ) -> tuple[Float[Tensor, "B T H Dh"], Float[Tensor, "B T H Dh"]]:
        """Project keys, turned, and values."""
        heads = (-1, self.sizes.head_dim)
        keys = rotate(self.self_attn.k_proj(x).unflatten(-1, heads), cos, sin)
        return keys, self.self_attn.v_proj(x).unflatten(-1, heads)

    def finish(
        self, mixed: Float[Tensor, "*N HqDh"], residual: Float[Tensor, "*N D"]
    ) -> Float[Tensor, "*N D"]:
        """Close the layer: output projection and MLP, each added to the residual stream."""
        residual = residual + self.self_attn.o_proj(mixed)
        return residual + self.mlp(self.post_attention_layernorm(residual))


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """Projections of a layer as decoding applies them: those of one input are one matrix."""

    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear

    @classmethod
    def of(cls, layer: EagleLayer) -> "LayerMatrices":
        """Fuse the weights of a layer as they are now."""
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            qkv=fuse(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            out=fuse(attention.o_proj.weight),
            gate_up=fuse(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=fuse(mlp.down_proj.weight),
        )


@dataclass(frozen=True, slots=True)
class NewPositions:
    """Where the new positions of a decoding pass go and what they may look at.

    Attributes:
        rows: slots, unique.
        positions: of every column, equal to its slot in memory.
        last: the last column of each row that counts.
        live: slots from 0 that any row may look at.
        is_prefix: True when `rows` is 0..R-1 in order.
        is_level: True when there is one column and it is at slot `live` - 1 in every row, so that
            no mask is needed.
    """

    rows: Int[Tensor, " R"]
    positions: Int[Tensor, "R W"]
    last: Int[Tensor, " R"]
    live: int
    is_prefix: bool
    is_level: bool

    def mask(self, groups: int, *, only_last: bool) -> Bool[Tensor, "R 1 GT S"] | None:
        """True where a position may look, tiled for grouped heads."""
        if self.is_level:
            return None
        own = self.positions
        if only_last:
            own = own.gather(1, self.last.unsqueeze(1))
        slots = torch.arange(self.live, device=own.device)
        return tile_mask(slots <= own.unsqueeze(2), groups)


def decode_layer(
    layer: EagleLayer,
    matrices: LayerMatrices,
    index: int,
    inputs: tuple[Float[Tensor, "R W D"], Float[Tensor, "R W D"]],
    where: NewPositions,
    kv: KVBuffers,
    angles: tuple[Float[Tensor, "R W Dr"], Float[Tensor, "R W Dr"]],
    *,
    only_last: bool,
) -> Float[Tensor, "R Wo D"]:
    """Run new positions through one layer, writing their keys and values.

    Args:
        layer: for its norms and sizes.
        matrices: its projections as decoding uses them.
        index: of the layer in `kv`.
        inputs: embeddings and hidden states; see `EagleLayer.read`.
        where: the positions.
        kv: memory of all layers.
        angles: cos and signed sin of the positions.
        only_last: True when nobody asks for the output of a position other than the last one that
            counts; the others are there for their keys. Wo is 1 then, else W.
    """
    heads, kv_heads = layer.sizes.heads, layer.sizes.kv_heads
    x, residual = layer.read(*inputs)
    projected = matrices.qkv(x).unflatten(-1, (-1, layer.sizes.head_dim))
    turned = rotate(projected[..., : heads + kv_heads, :], *angles).transpose(1, 2)
    queries, keys = turned.split([heads, kv_heads], dim=1)
    values = projected[..., heads + kv_heads :, :].transpose(1, 2)
    kv.write(index, kv.flat_slots(where.rows, where.positions), keys, values)
    if only_last:
        row = torch.arange(x.shape[0], device=x.device)
        queries = queries[row, :, where.last].unsqueeze(2)
        residual = residual[row, where.last].unsqueeze(1)
    mask = where.mask(heads // kv_heads, only_last=only_last)
    past = kv.read(index, where.rows, where.live, is_prefix=where.is_prefix)
    seen = attend(queries, *past, mask, scale=layer.sizes.head_dim**-0.5)
    residual = matrices.out.add_to(residual, seen.flatten(2))
    gate, up = matrices.gate_up(layer.post_attention_layernorm(residual)).chunk(2, dim=-1)
    return matrices.down.add_to(residual, nn.functional.silu(gate) * up)
