"""Which rows go into which optimizer step, batch and process: pure functions of the seed.

The rows of a step depend on (seed, epoch, rows of a step) only. Processes and accumulation merely
cut the same list into batches: batch `slot * processes + rank` of a step. So one process with two
batches a step and two processes with one run the very same batches.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from draftlab.randomness import Purpose, uniforms


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The order of rows over the whole training.

    Every epoch uses every row once. Its last step may hold fewer rows than the others; the places
    left over are None, that is, rows that hold padding only, so that all processes do equally many
    batches (case O-21).

    Attributes:
        num_rows: rows of the data.
        seed: the run's seed.
        batch_rows: rows of a batch.
        accumulation: batches of a process in a step.
        num_processes: processes that train together.
    """

    num_rows: int
    seed: int
    batch_rows: int
    accumulation: int
    num_processes: int

    @property
    def step_rows(self) -> int:
        """Rows of an optimizer step, over all processes."""
        return self.batch_rows * self.accumulation * self.num_processes

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the rows."""
        return math.ceil(self.num_rows / self.step_rows)

    def epoch(self, step: int) -> int:
        """Give the pass over the data, 0.., that an optimizer step (1..) belongs to."""
        return (step - 1) // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """List the rows of an optimizer step (1..), over all processes."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        order = _shuffled(self.num_rows, self.seed, epoch)
        return list(order[index * self.step_rows : (index + 1) * self.step_rows])

    def batches(self, step: int, rank: int) -> list[list[int | None]]:
        """List one process's batches of an optimizer step (1..), in order.

        Args:
            step: optimizer step, 1...
            rank: the process, 0..num_processes - 1.
        """
        rows: list[int | None] = [*self.rows(step)]
        rows += [None] * (self.step_rows - len(rows))
        chunks = [
            rows[start : start + self.batch_rows]
            for start in range(0, self.step_rows, self.batch_rows)
        ]
        return chunks[rank :: self.num_processes]


@lru_cache(maxsize=2)
def _shuffled(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    keys = uniforms(seed, epoch, int(Purpose.ORDER), torch.arange(num_rows))
    return tuple(torch.argsort(keys, stable=True).tolist())
