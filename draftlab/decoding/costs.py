"""What a target pass costs by its width, measured: t(T).

In: a target, its memory, a clock. Out: a `TimeCurve`, from which draft sizes are chosen.
"""

import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftlab.decoding.timing import DeviceClock
from draftlab.targets.cache import KVBuffers
from draftlab.targets.step import Step
from draftlab.targets.target import Target

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """Seconds of a pass of some rows over `widths` tokens a row, ascending widths."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, width: int) -> float:
        """Give seconds at a width: between two measured widths a line, outside the nearest one."""
        place = bisect_left(self.widths, width)
        if place == 0 or place == len(self.widths):
            return self.seconds[min(place, len(self.widths) - 1)]
        left, right = self.widths[place - 1], self.widths[place]
        share = (width - left) / (right - left)
        return self.seconds[place - 1] + share * (self.seconds[place] - self.seconds[place - 1])


def doubling_widths(most: int) -> tuple[int, ...]:
    """Give 1, 2, 4, ... and the largest width itself."""
    widths = [1]
    while widths[-1] * 2 < most:
        widths.append(widths[-1] * 2)
    return tuple(widths) if most == 1 else (*widths, most)


def measure_time_curve(
    target: Target,
    kv: KVBuffers,
    *,
    rows: int,
    base: int,
    widths: Sequence[int],
    clock: DeviceClock,
) -> TimeCurve:
    """Time passes of `rows` rows after `base` committed tokens: once to warm up, then the median.

    Slots past `base` are overwritten, so the rows must be empty or about to be.
    """
    device = target.device
    seconds = []
    for width in widths:
        step = Step(
            rows=torch.arange(rows, device=device),
            ids=torch.zeros(rows, width, dtype=torch.int64, device=device),
            base=torch.full((rows,), base, dtype=torch.int64, device=device),
            live=base + width,
        )
        spent = []
        for _ in range(1 + _REPEATS):
            began = clock.read()
            target.run(kv, step)
            spent.append(clock.read() - began)
        seconds.append(statistics.median(spent[1:]))
    # a wider pass is never cheaper: what says otherwise is noise
    for place in range(1, len(seconds)):
        seconds[place] = max(seconds[place], seconds[place - 1])
    return TimeCurve(tuple(widths), tuple(seconds))
