"""What a block drafter keeps while decoding: keys and values of every observed position.

Read observe, then run. Features of a position are projected once, for all layers in one product.
A block's own keys and values go past a row's length, where the next observation overwrites them.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from draftlab.drafters._block_backbone import BlockBackbone
from draftlab.drafters._block_layer import BlockLayer
from draftlab.drafters.base import Observation
from draftlab.drafters.layers import fuse, rotate
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.attention import attend, tile_mask
from draftlab.targets.cache import KVBuffers
from draftlab.targets.packing import PackedLinear


@dataclass(frozen=True, slots=True)
class _Matrices:
    """A layer's weights as decoding applies them: those of one input are one matrix."""

    qkv: PackedLinear
    qk_norm: Float[Tensor, "Hqk Dh"]
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear

    @classmethod
    def of(cls, layer: BlockLayer) -> "_Matrices":
        attention, mlp, sizes = layer.self_attn, layer.mlp, layer.sizes
        norms = [
            attention.q_norm.weight.detach().expand(sizes.heads, -1),
            attention.k_norm.weight.detach().expand(sizes.kv_heads, -1),
        ]
        return cls(
            qkv=fuse(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
            qk_norm=torch.cat(norms),
            out=fuse(attention.o_proj.weight),
            gate_up=fuse(mlp.gate_proj.weight, mlp.up_proj.weight),
            down=fuse(mlp.down_proj.weight),
        )


class BlockMemory:
    """Sequences being drafted for. `committed` mirrors `lengths` on the host.

    Attributes:
        lengths: positions observed, per slot.
        committed: the same numbers as Python integers.
        anchors: the newest token of every slot.
        capacity: longest sequence, tokens.
    """

    def __init__(self, backbone: BlockBackbone, slots: int, capacity: int) -> None:
        """Make buffers, rotary tables and fused matrices."""
        self.capacity = capacity
        self._backbone = backbone
        sizes, dtype, device = backbone.sizes, backbone.dtype, backbone.fc.weight.device
        layers = backbone.block_layers()
        # a block may begin at the last slot; one more takes writes that count for nothing
        room = capacity + backbone.choices.block_size + 1
        self._kv = KVBuffers(
            num_layers=len(layers),
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            slots=slots,
            capacity=room,
            dtype=dtype,
            device=device,
        )
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self.committed = [0] * slots
        self.anchors = torch.zeros(slots, dtype=torch.int64, device=device)
        cos, sin = backbone.angles(torch.arange(room, device=device))
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._fc = fuse(backbone.fc.weight)
        attentions = [layer.self_attn for layer in layers]
        # rows: layer, then keys before values
        self._context = fuse(*[m.weight for a in attentions for m in (a.k_proj, a.v_proj)])
        self._context_norm = torch.stack([a.k_norm.weight.detach() for a in attentions])
        self._layers = [_Matrices.of(layer) for layer in layers]

    def observe(self, seen: Observation) -> None:
        """Write keys and values of new positions; remember the newest token."""
        assert seen.taps is not None
        slots, counts = seen.rows.tolist(), seen.lengths.tolist()
        if max(counts, default=0) == 0:
            return
        sizes, base = self._backbone.sizes, self.lengths[seen.rows]
        for slot, count in zip(slots, counts, strict=True):
            self.committed[slot] += count
        columns = torch.arange(seen.ids.shape[1], device=base.device)
        positions = (base.unsqueeze(1) + columns).clamp_max(self._kv.capacity - 1)
        dtype = self._backbone.dtype
        fused = self._backbone.hidden_norm(self._fc(seen.taps.to(dtype).flatten(-2)))
        both = self._context(fused).unflatten(
            -1, (len(self._layers), 2, sizes.kv_heads, sizes.head_dim)
        )
        keys, values = both.unbind(dim=3)  # R W layers H Dh
        keys = F.rms_norm(keys, keys.shape[-1:], eps=sizes.eps)
        keys = keys * self._context_norm.unsqueeze(1)
        angles = [
            table[positions].unsqueeze(2).expand(*keys.shape[:3], -1)
            for table in (self._cos, self._sin)
        ]
        new = torch.stack([rotate(keys, *angles), values]).permute(3, 0, 1, 4, 2, 5)
        self._kv.write_all(self._kv.flat_slots(seen.rows, positions), new)
        last = (seen.lengths - 1).clamp_min(0).unsqueeze(1)
        newest = seen.next_ids.gather(1, last).squeeze(1)
        self.anchors[seen.rows] = torch.where(seen.lengths > 0, newest, self.anchors[seen.rows])
        self.lengths[seen.rows] = base + seen.lengths

    def run(self, rows: Int[Tensor, " R"], slots: int) -> Float[Tensor, "R S D"]:
        """Run a block of `slots` slots after each row's anchor; give its normed output."""
        backbone = self._backbone
        sizes, window = backbone.sizes, backbone.choices.sliding_window
        picked = rows.tolist()
        known = [self.committed[slot] for slot in picked]
        is_prefix = picked == list(range(len(picked)))
        live = max(known) + slots
        first = 0 if window is None else max(min(known) - window + 1, 0)
        lengths = self.lengths[rows].unsqueeze(1)
        positions = lengths + torch.arange(slots, device=rows.device)
        is_level = len(set(known)) == 1 and window is None and not backbone.choices.causal
        mask = None if is_level else self._mask(positions, first, live)
        tiled = None if mask is None else tile_mask(mask, sizes.heads // sizes.kv_heads)
        angles = self._cos[positions], self._sin[positions]
        flat = self._kv.flat_slots(rows, positions)
        hidden = backbone.fill(self.anchors[rows], slots)
        for i, (layer, own) in enumerate(zip(backbone.block_layers(), self._layers, strict=True)):
            projected = own.qkv(layer.input_layernorm(hidden)).unflatten(-1, (-1, sizes.head_dim))
            turning = projected[..., : sizes.heads + sizes.kv_heads, :]
            turning = F.rms_norm(turning, turning.shape[-1:], eps=sizes.eps) * own.qk_norm
            turned = rotate(turning, *angles).transpose(1, 2)
            queries, keys = turned.split([sizes.heads, sizes.kv_heads], dim=1)
            values = projected[..., sizes.heads + sizes.kv_heads :, :].transpose(1, 2)
            self._kv.write(i, flat, keys, values)
            past = self._kv.read(i, rows, live, is_prefix=is_prefix)
            keys, values = (x[:, :, first:] for x in past)
            mixed = attend(queries, keys, values, tiled, scale=sizes.head_dim**-0.5)
            hidden = own.out.add_to(hidden, mixed.flatten(2))
            gate, up = own.gate_up(layer.post_attention_layernorm(hidden)).chunk(2, dim=-1)
            hidden = own.down.add_to(hidden, nn.functional.silu(gate) * up)
        return backbone.norm(hidden)

    def close(self, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences; what lies in their buffers is past their length."""
        self.lengths[rows] = 0
        for slot in rows.tolist():
            self.committed[slot] = 0

    def num_nodes(self, rows: Int[Tensor, " R"], depth: int) -> Int[Tensor, " R"]:
        """Count the draft tokens that fit; none for slots that hold nothing."""
        lengths = self.lengths[rows]
        room = (self.capacity - 1 - lengths).clamp(0, depth)
        return torch.where(lengths > 0, room, 0)

    def _mask(self, positions: Int[Tensor, "R S"], first: int, live: int) -> Bool[Tensor, "R S L"]:
        """True where a slot of a block may look among buffer slots first..live-1."""
        choices = self._backbone.choices
        places = torch.arange(first, live, device=positions.device)
        end = positions if choices.causal else positions[:, -1:]
        mask = (places <= end.unsqueeze(2)).expand(*positions.shape, -1)
        if choices.sliding_window is not None:
            mask = mask & (places > positions.unsqueeze(2) - choices.sliding_window)
        return mask
