"""The target's KV memory: one stacked buffer, rows with lengths of their own, no realignment.

Slot index equals position for committed tokens in every row. Slots past a row's committed length
hold garbage that no mask lets through; rejected drafts are simply overwritten by the next pass.
Nothing here knows a transformers version; `adapter.py` and the fast path both write through this.
"""

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Float, Int, Tensor


class KVBuffers:
    """Keys and values of `slots` sequences of at most `capacity` positions.

    `data` has the shape [L, 2, slots, capacity, H, Dh], whatever the order in memory.

    Made and used under `torch.inference_mode()`: a buffer made there cannot be written elsewhere.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeroed buffers (zeros, so that masked garbage is never NaN)."""
        if slots < 1 or capacity < 1:
            raise ConfigError(f"slots={slots}, capacity={capacity}: expected at least 1 of each")
        self.slots = slots
        self.capacity = capacity
        # a head's positions lie side by side: attention reads them a fifth to a half faster than
        # with heads innermost, measured on 3 key heads of width 64, 12 to 32 rows
        shape = (num_layers, 2, slots, num_kv_heads, capacity, head_dim)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.data = self._storage.transpose(3, 4)
        self._flat = self._storage.view(num_layers, 2, -1, head_dim)
        self._heads = torch.arange(num_kv_heads, device=device).view(1, -1, 1)
        # views made once: cutting them out of the whole anew in every layer of every pass is slow
        self._layers = [(layer[0], layer[1]) for layer in self._storage]
        self._pairs = list(self._storage.view(num_layers, -1, head_dim))

    def flat_slots(
        self, rows: Int[Tensor, " R"], positions: Int[Tensor, "R T"]
    ) -> Int[Tensor, " RHT"]:
        """Give the flat index of (row, head, slot); unique as long as (row, slot) pairs are."""
        heads = rows.view(-1, 1, 1) * self._heads.shape[1] + self._heads
        return (heads * self.capacity + positions.unsqueeze(1)).flatten()

    def write(
        self,
        layer: int,
        flat: Int[Tensor, " RHT"],
        keys: Float[Tensor, "R H T Dh"],
        values: Float[Tensor, "R H T Dh"],
    ) -> None:
        """Store new keys and values of one layer at flat slots."""
        width = keys.shape[3]
        self._flat[layer, 0].index_copy_(0, flat, keys.reshape(-1, width))
        self._flat[layer, 1].index_copy_(0, flat, values.reshape(-1, width))

    def pair_slots(
        self, rows: Int[Tensor, " R"], positions: Int[Tensor, "R T"]
    ) -> Int[Tensor, " RTP"]:
        """Give the flat index of (row, slot, key or value, head), for `write_pairs`."""
        heads = self._heads.flatten()
        kinds = torch.arange(2, device=heads.device).unsqueeze(1) * self.slots
        places = (kinds + rows.view(-1, 1, 1)) * heads.shape[0] + heads
        return (places.unsqueeze(1) * self.capacity + positions[..., None, None]).flatten()

    def write_pairs(
        self, layer: int, flat: Int[Tensor, " RTP"], pairs: Float[Tensor, "R T P Dh"]
    ) -> None:
        """Store new keys, and behind them values, of one layer in one copy."""
        self._pairs[layer].index_copy_(0, flat, pairs.reshape(-1, pairs.shape[3]))

    def write_all(self, flat: Int[Tensor, " RHT"], both: Float[Tensor, "L 2 R H T Dh"]) -> None:
        """Store new keys and values of all layers at flat slots."""
        self._flat.index_copy_(2, flat, both.flatten(2, 4))

    def read(
        self, layer: int, rows: Int[Tensor, " R"], live: int, *, is_prefix: bool
    ) -> tuple[Float[Tensor, "R H S Dh"], Float[Tensor, "R H S Dh"]]:
        """Give keys and values of some rows, cut to the first `live` slots.

        Args:
            layer: which decoder layer.
            rows: slots to read.
            live: slots from 0 that attention may look at.
            is_prefix: True when `rows` is 0..R-1 in order: then these are views, not copies.
        """
        keys, values = self._layers[layer]
        if not is_prefix:
            return keys[rows, :, :live], values[rows, :, :live]
        if rows.shape[0] != self.slots:
            keys, values = keys.narrow(0, 0, rows.shape[0]), values.narrow(0, 0, rows.shape[0])
        return keys.narrow(2, 0, live), values.narrow(2, 0, live)

    def compact(
        self,
        rows: Int[Tensor, " R"],
        base: Int[Tensor, " R"],
        path: Int[Tensor, "R K"],
    ) -> None:
        """Move an accepted tree path into contiguous slots, all layers at once.

        Node n of a row sits at slot base + 1 + n; depth d of the path belongs at base + 1 + d.
        Entries of -1 copy a slot onto itself. One gather (a copy, so overlap is safe), one write.
        """
        depth = torch.arange(path.shape[1], device=path.device)
        to = base.unsqueeze(1) + 1 + depth
        source = torch.where(path >= 0, base.unsqueeze(1) + 1 + path, to)
        moved = self._flat.index_select(2, self.flat_slots(rows, source))
        self._flat.index_copy_(2, self.flat_slots(rows, to), moved)

    @property
    def num_bytes(self) -> int:
        """Memory held, bytes."""
        return self.data.numel() * self.data.element_size()
