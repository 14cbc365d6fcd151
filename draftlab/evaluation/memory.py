"""The most memory that was in use while something ran.

On CUDA torch's peak of allocated memory; on Linux the process's highest resident memory, which the
system lets a process count anew; elsewhere unknown.
"""

from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_COUNT_PEAK_ANEW = "5"


class PeakMemory:
    """Counts from `restart` on."""

    def __init__(self, device: torch.device) -> None:
        """Choose whose memory."""
        self._device = device
        self._is_known = device.type == "cuda" or _can_restart()

    def restart(self) -> None:
        """Begin anew with what is in use now."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._is_known:
            _RESET.write_text(_COUNT_PEAK_ANEW)

    def read(self) -> int | None:
        """Give the peak in bytes; None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return _highest_resident() if self._is_known else None


def _can_restart() -> bool:
    try:
        _RESET.write_text(_COUNT_PEAK_ANEW)
    except OSError:
        return False
    return _highest_resident() is not None


def _highest_resident() -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
