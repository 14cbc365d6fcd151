"""A decoder layer of an EAGLE head: as a trained module, and as decoding runs it over its memory.

Read EagleLayer, then decode_layers.
"""

from collections.abc import Sequence
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
    """A decoder layer; the first one may read embedding and hidden state side by side."""

    def __init__(
        self,
        sizes: LayerSizes,
        *,
        is_first: bool,
        norm_before_residual: bool = False,
        norms_input: bool = True,
    ) -> None:
        """Make a layer.

        Args:
            sizes: like the target's.
            is_first: reads [embedding, hidden], each through a norm of its own (EAGLE-3).
            norm_before_residual: with `is_first`, the residual is the normed hidden state.
            norms_input: False leaves out the norm before the attention (EAGLE-1's first layer).
        """
        super().__init__()
        self.sizes = sizes
        self.norm_before_residual = norm_before_residual
        self.self_attn = _Attention(sizes, 2 * sizes.hidden if is_first else sizes.hidden)
        self.mlp = SwiGLU(sizes.hidden, sizes.intermediate)
        self.input_layernorm = RMSNorm(sizes.hidden, sizes.eps) if norms_input else None
        self.hidden_norm = RMSNorm(sizes.hidden, sizes.eps) if is_first else None
        self.post_attention_layernorm = RMSNorm(sizes.hidden, sizes.eps)

    def read(
        self, embedded: Float[Tensor, "*N D"], hidden: Float[Tensor, "*N D"]
    ) -> tuple[Float[Tensor, "*N In"], Float[Tensor, "*N D"]]:
        """Give the attention's input and the residual; only `is_first` reads the embedding."""
        if self.input_layernorm is None:
            return hidden, hidden
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
class Branches:
    """Speculative positions of a tree: they lie past the committed ones, and see ancestors only.

    Attributes:
        base: committed positions of each row; tree slot e is slot base + e.
        offset: tree slot of the first new column.
        ancestors: True at tree slots a new column may look at, its own included.
    """

    base: Int[Tensor, " R"]
    offset: int
    ancestors: Bool[Tensor, "R W E"]

    def visible(self, slots: Int[Tensor, " S"]) -> Bool[Tensor, "R W S"]:
        """True where a new column may look at a slot, as far as windows do not forbid it."""
        inside = slots - self.base.view(-1, 1, 1)
        last = self.ancestors.shape[2] - 1
        index = inside.clamp(0, last).expand(-1, self.ancestors.shape[1], -1)
        return (inside < 0) | ((inside <= last) & self.ancestors.gather(2, index))


@dataclass(frozen=True, slots=True)
class NewPositions:
    """Where the new positions of a decoding pass go and what they may look at.

    Attributes:
        rows: slots of sequences, unique.
        positions: of every column; equal to its slot in memory unless there are `branches`.
        live: memory slots below it are all that any row may look at.
        is_prefix: True when `rows` is 0..R-1 in order.
        is_level: True when there is one column and it is at slot `live` - 1 in every row, so that
            no mask is needed: a window begins at `first`.
        last: the only column of each row whose output is wanted, the others being there for their
            keys; None wants all.
        branches: for the nodes of a tree; None is a chain. Its ancestors are those in the window.
        window: positions a column may look back to, itself included; None means all.
        first: memory slots below it lie outside of every window.
    """

    rows: Int[Tensor, " R"]
    positions: Int[Tensor, "R W"]
    live: int
    is_prefix: bool
    is_level: bool
    last: Int[Tensor, " R"] | None = None
    branches: Branches | None = None
    window: int | None = None
    first: int = 0

    @property
    def slots(self) -> Int[Tensor, "R W"]:
        """Memory slot of every column."""
        if self.branches is None:
            return self.positions
        columns = torch.arange(self.positions.shape[1], device=self.positions.device)
        return self.branches.base.unsqueeze(1) + self.branches.offset + columns

    def mask(self, groups: int, last: Int[Tensor, " R"] | None) -> Bool[Tensor, "R 1 GT S"] | None:
        """True where a position may look, tiled for grouped heads."""
        if self.is_level:
            return None
        own = self.positions if last is None else self.positions.gather(1, last.unsqueeze(1))
        slots = torch.arange(self.first, self.live, device=own.device)
        own = own.unsqueeze(2)
        seen = slots <= own if self.branches is None else self.branches.visible(slots)
        if self.window is None:
            return tile_mask(seen, groups)
        # columns past a row's length stand past `live`: they count for nothing, but see something
        near = slots > own.clamp_max(self.live - 1) - self.window
        if self.branches is not None:  # slots of a tree are no positions
            near = near | (slots >= self.branches.base.view(-1, 1, 1))
        return tile_mask(seen & near, groups)


def decode_layers(
    layers: Sequence[EagleLayer],
    matrices: Sequence[LayerMatrices],
    embedded: Float[Tensor, "R W D"],
    hidden: Float[Tensor, "R W D"],
    where: NewPositions,
    kv: KVBuffers,
    angles: tuple[Float[Tensor, "R W Dr"], Float[Tensor, "R W Dr"]],
) -> Float[Tensor, "R Wo D"]:
    """Run new positions through all layers, writing their keys and values.

    Args:
        layers: for their norms and sizes.
        matrices: their projections as decoding uses them.
        embedded: see `EagleLayer.read`.
        hidden: alike.
        where: the positions.
        kv: memory of all layers.
        angles: cos and signed sin of the positions.

    Returns:
        The residual stream, at `where.last` only (Wo = 1) when given.
    """
    for i, (layer, projections) in enumerate(zip(layers, matrices, strict=True)):
        wanted = where.last if i == len(layers) - 1 and hidden.shape[1] > 1 else None
        x, residual = layer.read(embedded, hidden)
        hidden = _decode_layer(layer, projections, i, x, residual, where, kv, angles, wanted)
    return hidden


def _decode_layer(
    layer: EagleLayer,
    matrices: LayerMatrices,
    index: int,
    x: Tensor,
    residual: Tensor,
    where: NewPositions,
    kv: KVBuffers,
    angles: tuple[Tensor, Tensor],
    last: Tensor | None,
) -> Tensor:
    heads, kv_heads = layer.sizes.heads, layer.sizes.kv_heads
    projected = matrices.qkv(x).unflatten(-1, (-1, layer.sizes.head_dim))
    turned = rotate(projected[..., : heads + kv_heads, :], *angles).transpose(1, 2)
    queries, keys = turned.split([heads, kv_heads], dim=1)
    values = projected[..., heads + kv_heads :, :].transpose(1, 2)
    kv.write(index, kv.flat_slots(where.rows, where.slots), keys, values)
    if last is not None:
        row = torch.arange(x.shape[0], device=x.device)
        queries = queries[row, :, last].unsqueeze(2)
        residual = residual[row, last].unsqueeze(1)
    mask = where.mask(heads // kv_heads, last)
    past = kv.read(index, where.rows, where.live, is_prefix=where.is_prefix)
    keys, values = (x[:, :, where.first :] for x in past)
    seen = attend(queries, keys, values, mask, scale=layer.sizes.head_dim**-0.5)
    residual = matrices.out.add_to(residual, seen.flatten(2))
    gate, up = matrices.gate_up(layer.post_attention_layernorm(residual)).chunk(2, dim=-1)
    return matrices.down.add_to(residual, nn.functional.silu(gate) * up)
