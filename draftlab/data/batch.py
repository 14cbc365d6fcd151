"""What training reads: token rows, packed or not. The type that crosses from data to drafters."""

from dataclasses import dataclass

import torch

from draftlab.shapes import Bool, Int, Tensor


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B rows of T tokens; several samples may share a row (packing), none may see another.

    Attributes:
        input_ids: target ids; padding holds id 0 and is told by `segment_ids`, never by its id.
        loss_mask: True where the target spoke, that is, where the token itself is learned. A
            prediction counts when the token *predicted* is True here.
        positions: 0-based position inside the sample, as RoPE sees it.
        segment_ids: 0.. for the samples of a row in order, -1 for padding.
        sample_ids: id of the sample each position belongs to (key of all randomness), -1 padding.
    """

    input_ids: Int[Tensor, "B T"]
    loss_mask: Bool[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    segment_ids: Int[Tensor, "B T"]
    sample_ids: Int[Tensor, "B T"]

    def to(self, device: torch.device) -> "TokenBatch":
        """Copy to a device."""
        return TokenBatch(
            self.input_ids.to(device),
            self.loss_mask.to(device),
            self.positions.to(device),
            self.segment_ids.to(device),
            self.sample_ids.to(device),
        )

    def shifted_mask(self, steps: int) -> Bool[Tensor, "B T"]:
        """True at row t when token t + steps exists, is in the same sample and is learned."""
        out = torch.zeros_like(self.loss_mask)
        if steps < self.input_ids.shape[1]:
            same = self.segment_ids[:, steps:] == self.segment_ids[:, : -steps or None]
            out[:, : -steps or None] = (
                self.loss_mask[:, steps:] & same & (self.segment_ids[:, steps:] >= 0)
            )
        return out

    def shifted_ids(self, steps: int) -> Int[Tensor, "B T"]:
        """Token t + steps at row t (0 past the end; `shifted_mask` says where it is meaningful)."""
        out = torch.zeros_like(self.input_ids)
        if steps < self.input_ids.shape[1]:
            out[:, : -steps or None] = self.input_ids[:, steps:]
        return out

    @property
    def num_sequences(self) -> int:
        """Samples with something to learn: at least one True token that has a predecessor."""
        mask = self.shifted_mask(1)
        rows = zip(self.sample_ids, mask, strict=True)
        return sum(int(torch.unique(row[m]).numel()) for row, m in rows)
