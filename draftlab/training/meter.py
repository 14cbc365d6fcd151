"""Sums of what happened since the last line of numbers, over batches and processes."""

import resource
import sys

import torch
from torch import distributed, nn

from draftlab.drafters.base import DraftLoss
from draftlab.shapes import Float, Tensor


class Meter:
    """Adds up losses as sums and counts, so that means are exact over any layout."""

    def __init__(self, device: torch.device, num_processes: int) -> None:
        """Start empty; every process needs one, and all must call `read` together."""
        self._device = device
        self._num_processes = num_processes
        self._clear()

    def add_batch(self, loss: DraftLoss | None) -> None:
        """Take in one batch of this process; None when it had nothing to learn."""
        if loss is None:
            return
        sums = torch.stack([loss.loss_sum, loss.hit_sum, loss.overlap_sum, loss.count])
        weight = loss.total.new_zeros(()) if loss.weight is None else loss.weight
        flat = torch.cat([torch.stack([loss.total, weight.to(loss.total)]), sums.flatten()])
        flat = flat.detach().to(torch.float64)
        self._sums = flat if self._sums is None else self._sums + flat

    def add_step(self, *, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Take in one optimizer step.

        Args:
            num_sequences: sequences with something to learn, over all processes.
            num_tokens: tokens in use, over all processes.
            seconds: how long the step took.
        """
        self._steps += 1
        self._sequences += num_sequences
        self._tokens += num_tokens
        self._seconds += seconds

    def read(self) -> dict[str, float]:
        """Give the means since the last reading, the same on every process, and start anew."""
        sums = self._reduced()
        numbers = {
            # a mean over predictions where these have weights, else over sequences
            "train/loss": float(sums[0]) / (float(sums[1]) or max(1, self._sequences)),
            "train/tokens_per_s": self._tokens / max(self._seconds, 1e-9),
            "train/sequences_per_s": self._sequences / max(self._seconds, 1e-9),
            "time/step_s": self._seconds / max(1, self._steps),
            "memory/peak_bytes": float(_peak_bytes(self._device)),
        }
        per_depth = sums[2:].reshape(4, -1).tolist()
        for k, (loss, hits, overlap, count) in enumerate(zip(*per_depth, strict=True), start=1):
            if count:
                numbers[f"train/loss_{k}"] = loss / count
                numbers[f"train/hit_{k}"] = hits / count
                numbers[f"train/overlap_{k}"] = overlap / count
        self._clear()
        return numbers

    def _reduced(self) -> Float[Tensor, " N"]:
        own = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._sums is not None:
            own = self._sums
        if self._num_processes > 1:
            # a process that met nothing to learn does not know how many depths there are
            size = torch.tensor([own.numel()], device=self._device)
            distributed.all_reduce(size, distributed.ReduceOp.MAX)
            own = nn.functional.pad(own, (0, int(size) - own.numel()))
            distributed.all_reduce(own)
        return own.cpu()

    def _clear(self) -> None:
        self._sums: Float[Tensor, " N"] | None = None
        self._steps = 0
        self._sequences = 0
        self._tokens = 0
        self._seconds = 0.0


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux
