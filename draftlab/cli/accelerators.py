"""What named accelerators can do, by their makers' data sheets, for estimates of time."""

from dataclasses import dataclass

from draftlab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device.

    Attributes:
        name: what people call it.
        flops: bf16 multiplications and additions a second, dense, at the peak.
        bytes_per_s: from its memory, at the peak.
        link_bytes_per_s: to the other devices of its machine, one way, at the peak.
        memory_bytes: as it is sold.
    """

    name: str
    flops: float
    bytes_per_s: float
    link_bytes_per_s: float
    memory_bytes: int


_KNOWN = {
    "rtx4090": Accelerator("RTX 4090", 165e12, 1.01e12, 32e9, 24_000_000_000),
    "l40s": Accelerator("L40S", 362e12, 0.86e12, 32e9, 48_000_000_000),
    "a100": Accelerator("A100 80 GB", 312e12, 2.04e12, 300e9, 80_000_000_000),
    "h100": Accelerator("H100 80 GB", 989e12, 3.35e12, 450e9, 80_000_000_000),
    "h200": Accelerator("H200 141 GB", 989e12, 4.8e12, 450e9, 141_000_000_000),
    "b200": Accelerator("B200 180 GB", 2250e12, 8.0e12, 900e9, 180_000_000_000),
}


def find_accelerator(name: str) -> Accelerator:
    """Find a device by its short name.

    Raises:
        ConfigError: a name that is not known, with those that are.
    """
    if name not in _KNOWN:
        raise ConfigError(f"accelerator={name} is not known; known: {', '.join(_KNOWN)}")
    return _KNOWN[name]
