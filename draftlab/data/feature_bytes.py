"""How captured hidden states lie in a file: as they are, in bfloat16, or in 8 bits with scales.

fp8 is float8_e4m3 with one float32 scale a vector (a token's state at one layer), chosen so that
the vector's largest value is the format's largest. Being floating point, it keeps small values
beside the few huge ones that residual streams have: each is off by at most 1/16 of itself down to
2^-14 of the vector's largest.
"""

from typing import Any, Literal

import torch

from draftlab.shapes import Float, Tensor

FeatureDtype = Literal["target", "bf16", "fp8"]

_EIGHT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_EIGHT).max
_SCALES = "_scales"
_SCALE_BYTES = 4


def lay_out_vectors(
    name: str, vectors: Float[Tensor, "*N D"], dtype: FeatureDtype
) -> dict[str, Tensor]:
    """Give the tensors to write under `name` and, in 8 bits, under the name of its scales."""
    match dtype:
        case "target":
            return {name: vectors.contiguous()}
        case "bf16":
            return {name: vectors.bfloat16().contiguous()}
        case "fp8":
            wide = vectors.float()
            scales = wide.abs().amax(-1, keepdim=True) / _LARGEST
            scales = torch.where(scales > 0, scales, 1.0)  # a vector of zeros stays one
            return {
                name: (wide / scales).to(_EIGHT).contiguous(),
                name + _SCALES: scales.contiguous(),
            }


def take_vectors(name: str, start: int, end: int, file: Any) -> Float[Tensor, "T *N D"] | None:
    """Read rows of what `lay_out_vectors` wrote; None where nothing of the name was written.

    Args:
        name: as it was written.
        start: first row.
        end: row after the last.
        file: an open safetensors file.
    """
    names = set(file.keys())
    if name not in names:
        return None

    def rows(of: str) -> Tensor:
        return file.get_slice(of)[start:end]

    if name + _SCALES not in names:
        return rows(name)
    return rows(name).float() * rows(name + _SCALES)


def bytes_of_vector(width: int, dtype: FeatureDtype, target_bytes: int) -> int:
    """Count the bytes of one hidden state in a file.

    Args:
        width: D.
        dtype: how it is written.
        target_bytes: bytes of one number in the target's own dtype.
    """
    match dtype:
        case "target":
            return width * target_bytes
        case "bf16":
            return width * 2
        case "fp8":
            return width + _SCALE_BYTES
