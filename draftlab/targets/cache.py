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
        shape = (num_layers, 2, slots, capacity, num_kv_heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._flat = self.data.view(num_layers, 2, slots * capacity, num_kv_heads, head_dim)

    def flat_slots(
        self, rows: Int[Tensor, " R"], positions: Int[Tensor, "R T"]
    ) -> Int[Tensor, " RT"]:
        """Give the flat index of (row, slot) pairs; unique as long as the pairs are."""
        return (rows.unsqueeze(1) * self.capacity + positions).flatten()

    def write(
        self,
        layer: int,
        flat: Int[Tensor, " RT"],
        keys: Float[Tensor, "R H T Dh"],
        values: Float[Tensor, "R H T Dh"],
    ) -> None:
        """Store new keys and values of one layer at flat slots."""
        heads, width = keys.shape[1], keys.shape[3]
        self._flat[layer, 0].index_copy_(0, flat, keys.transpose(1, 2).reshape(-1, heads, width))
        self._flat[layer, 1].index_copy_(0, flat, values.transpose(1, 2).reshape(-1, heads, width))

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
        both = self.data[layer]
        both = both[:, : rows.shape[0], :live] if is_prefix else both[:, rows, :live]
        both = both.transpose(2, 3)
        return both[0], both[1]

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
