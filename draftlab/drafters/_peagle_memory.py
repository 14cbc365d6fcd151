"""What P-EAGLE keeps while decoding: keys and values of true rows, and the newest rows themselves.

The newest true rows wait until the next proposal, which runs them together with the mask rows: one
pass over the weights a round. Read observe, then run.
"""

from collections.abc import Sequence

import torch

from draftlab.drafters._eagle_layer import EagleLayer, LayerMatrices, NewPositions, decode_layers
from draftlab.drafters.base import Observation
from draftlab.drafters.layers import Angles
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers


class ParallelMemory:
    """Sequences being drafted for.

    A slot's newest rows, its last one at least, are kept as inputs. They are run again with every
    proposal, which writes the same keys and values again; an observation first runs those that no
    proposal has run yet.
    """

    def __init__(
        self,
        layers: Sequence[EagleLayer],
        angles: Angles,
        *,
        slots: int,
        capacity: int,
        num_depths: int,
        mask_inputs: tuple[Float[Tensor, " D"], Float[Tensor, " D"]],
        window: int | None,
    ) -> None:
        """Make buffers, rotary tables and fused matrices.

        Args:
            layers: of the head.
            angles: gives cos and signed sin of positions.
            slots: sequences that may live at once.
            capacity: longest sequence, tokens.
            num_depths: most tokens drafted; as many true rows and one more may wait.
            mask_inputs: embedding and hidden state of a mask row.
            window: positions a row may look back to, itself included; None means all.
        """
        self.capacity = capacity
        self._modules = list(layers)
        self._mask_inputs = mask_inputs
        self._waiting = num_depths + 1
        self._window = window
        sizes, hidden = layers[0].sizes, mask_inputs[1]
        dtype, device = hidden.dtype, hidden.device
        # mask rows may follow the last slot; one more takes writes that count for nothing
        room = capacity + 2 * num_depths + 1
        self._kv = KVBuffers(
            num_layers=len(layers),
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            slots=slots,
            capacity=room,
            dtype=dtype,
            device=device,
        )
        cos, sin = angles(torch.arange(room, device=device))
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._layers = [LayerMatrices.of(layer) for layer in layers]
        # inputs of the newest rows: embedding, hidden state
        self._newest = torch.zeros(
            2, slots, self._waiting, hidden.shape[0], dtype=dtype, device=device
        )
        self._counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self._committed = [0] * slots
        self._is_run = [True] * slots

    def observe(
        self, seen: Observation, embedded: Float[Tensor, "R W D"], hidden: Float[Tensor, "R W D"]
    ) -> None:
        """Take in true rows.

        Args:
            seen: which positions.
            embedded: of the token after each.
            hidden: fused taps of each.
        """
        new = [
            (r, slot, count)
            for r, (slot, count) in enumerate(
                zip(seen.rows.tolist(), seen.lengths.tolist(), strict=True)
            )
            if count > 0
        ]
        late = [slot for _, slot, _ in new if not self._is_run[slot]]
        if late:
            self._run_waiting(late)
        width = max(count for _, _, count in new)
        keep = torch.tensor([r for r, _, _ in new], device=seen.rows.device)
        rows, lengths, both = seen.rows[keep], seen.lengths[keep], torch.stack([embedded, hidden])
        both = both[:, keep, :width]
        if width > self._waiting:
            base, lowest = self._lengths[rows], self._least(rows)
            for _, slot, count in new:
                self._committed[slot] += count
            self._advance(rows, base, both, lowest=lowest, live=self._most(rows))
            both = both.gather(2, (lengths - 1).view(1, -1, 1, 1).expand(2, -1, -1, both.shape[3]))
            self._newest[:, rows, :1] = both
            self._counts[rows] = 1
        else:
            for _, slot, count in new:
                self._committed[slot] += count
            self._newest[:, rows, :width] = both
            self._counts[rows] = lengths
        self._lengths[rows] += lengths
        for _, slot, _ in new:
            self._is_run[slot] = width > self._waiting

    def run(self, rows: Int[Tensor, " R"], depth: int) -> Float[Tensor, "R K D"]:
        """Run the newest true rows and depth - 1 mask rows; give the output of each depth."""
        picked = rows.tolist()
        counts = self._counts[rows]
        waiting = self._waiting
        width = waiting + depth - 1 if len(picked) > 1 else int(counts[0]) + depth - 1
        columns = torch.arange(width, device=rows.device)
        is_true = (columns < counts.unsqueeze(1)).unsqueeze(2)
        inputs = []
        for newest, mask in zip(self._newest, self._mask_inputs, strict=True):
            true = newest[rows]
            true = torch.nn.functional.pad(true, (0, 0, 0, max(width - waiting, 0)))[:, :width]
            inputs.append(torch.where(is_true, true, mask))
        base = self._lengths[rows] - counts
        lowest, live = self._least(rows) - waiting, self._most(rows) + depth - 1
        output = self._advance(rows, base, torch.stack(inputs), lowest=lowest, live=live)
        for slot in picked:
            self._is_run[slot] = True
        steps = torch.arange(depth, device=rows.device)
        index = ((counts - 1).clamp_min(0).unsqueeze(1) + steps).unsqueeze(2)
        return output.gather(1, index.expand(-1, -1, output.shape[2]))

    def close(self, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences; what lies in their buffers is past their length."""
        self._lengths[rows] = 0
        self._counts[rows] = 0
        for slot in rows.tolist():
            self._committed[slot] = 0
            self._is_run[slot] = True

    def num_nodes(self, rows: Int[Tensor, " R"], depth: int) -> Int[Tensor, " R"]:
        """Count the draft tokens that fit; none for slots that hold nothing."""
        lengths = self._lengths[rows]
        room = (self.capacity - 1 - lengths).clamp(0, depth)
        return torch.where(lengths > 0, room, 0)

    def _most(self, rows: Int[Tensor, " R"]) -> int:
        return max(self._committed[slot] for slot in rows.tolist())

    def _least(self, rows: Int[Tensor, " R"]) -> int:
        return min(self._committed[slot] for slot in rows.tolist())

    def _run_waiting(self, slots: list[int]) -> None:
        """Write keys and values of rows that no proposal has run."""
        rows = torch.tensor(slots, device=self._lengths.device)
        counts = self._counts[rows]
        inputs = self._newest[:, rows, : int(counts.max())]
        lowest, live = self._least(rows) - self._waiting, self._most(rows)
        self._advance(rows, self._lengths[rows] - counts, inputs, lowest=lowest, live=live)

    def _advance(
        self,
        rows: Int[Tensor, " R"],
        base: Int[Tensor, " R"],
        inputs: Float[Tensor, "2 R W D"],
        *,
        lowest: int,
        live: int,
    ) -> Float[Tensor, "R W D"]:
        """Run rows at positions base, base + 1, ... through the layers; `lowest` bounds base."""
        picked = rows.tolist()
        columns = torch.arange(inputs.shape[2], device=rows.device)
        positions = (base.unsqueeze(1) + columns).clamp_max(self._kv.capacity - 1)
        where = NewPositions(
            rows=rows,
            positions=positions,
            live=live,
            is_prefix=picked == list(range(len(picked))),
            is_level=False,
            window=self._window,
            first=0 if self._window is None else max(lowest - self._window + 1, 0),
        )
        embedded, hidden = inputs.unbind(0)
        angles = self._cos[positions], self._sin[positions]
        return decode_layers(self._modules, self._layers, embedded, hidden, where, self._kv, angles)
