"""All randomness of draftlab: a pure function of named integers.

In: integers that say *which* number is wanted (seed, row, position, purpose). Out: that number.
Nothing here reads or writes a global generator, so a row's draws do not depend on its batch-mates,
on the rank that draws them, or on what was drawn before.
"""

import hashlib
from enum import IntEnum

import torch

from draftlab.shapes import Float, Int, Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a random number is for. Two purposes never share a stream (decoder hazard H4)."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3
    SAMPLE = 4
    NOISE = 5
    INIT = 6
    ORDER = 7


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift of a two's-complement int64


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def uniforms(*keys: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Compute numbers in [0, 1), one for each combination of the broadcast keys.

    Counter-based (the splitmix64 finaliser applied key by key), float64, on the keys' device.
    Equal keys give equal numbers on every device, whatever else was drawn.

    Args:
        keys: integers or int64 tensors that broadcast, such as seed, row [B, 1], slot [N], purpose.
    """
    # made where the keys are: a copy to a device would wait for it
    device = next((key.device for key in keys if isinstance(key, torch.Tensor)), None)
    state: Tensor = torch.zeros((), dtype=torch.int64, device=device)
    for key in keys:
        if isinstance(key, torch.Tensor):
            state = state.to(key.device) + key.to(torch.int64)
        else:
            state = state + _signed(int(key))
        state = _mix(state + _signed(_GOLDEN))
    # 53 bits: every value is exactly representable and 1.0 cannot come out (hazard H17)
    return _shift_right(state, 11).to(torch.float64) * (1.0 / (1 << 53))


def derive_seed(*parts: int | str) -> int:
    """Compute a 63-bit seed from named parts, such as ("noise", seed, sample_id, epoch)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Noise:
    """Training noise keyed by (seed, epoch, sample id, purpose), never by rank or global state."""

    def __init__(self, seed: int, epoch: int = 0) -> None:
        """Name the stream: the run's seed and the pass over the data."""
        self.seed = seed
        self.epoch = epoch

    def uniform(
        self, sample_ids: Int[Tensor, "B T"], width: int, purpose: str
    ) -> Float[Tensor, "B T width"]:
        """Draw numbers in [0, 1) for every position; equal for a sample wherever it is packed.

        Args:
            sample_ids: the sample each position belongs to; -1 marks padding, which gets 0.5.
            width: numbers per position.
            purpose: name of the stream, such as "tap_noise".
        """
        out = torch.full((*sample_ids.shape, width), 0.5)
        for b, row in enumerate(sample_ids.cpu()):
            ids, counts = torch.unique_consecutive(row, return_counts=True)
            start = 0
            for sample, count in zip(ids.tolist(), counts.tolist(), strict=True):
                if sample >= 0:
                    generator = torch.Generator().manual_seed(
                        derive_seed("noise", self.seed, self.epoch, sample, purpose)
                    )
                    out[b, start : start + count] = torch.rand(count, width, generator=generator)
                start += count
        return out.to(sample_ids.device)
