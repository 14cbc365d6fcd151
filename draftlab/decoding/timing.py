"""A clock that waits for the device, so that a reading means the work before it is done."""

import time
from collections.abc import Callable
from functools import partial

import torch


class DeviceClock:
    """Seconds since some start; each reading first waits for queued device work (case O-32)."""

    def __init__(
        self,
        device: torch.device,
        *,
        now: Callable[[], float] = time.perf_counter,
        synchronise: Callable[[], None] | None = None,
    ) -> None:
        """Choose the device; `now` and `synchronise` are replaced in tests."""
        self._now = now
        if synchronise is None and device.type == "cuda":
            synchronise = partial(torch.cuda.synchronize, device)
        self._synchronise = synchronise

    def read(self) -> float:
        """Wait for the device, then read the clock."""
        if self._synchronise is not None:
            self._synchronise()
        return self._now()
