"""Linear layers whose weights are laid out once for oneDNN's kernels.

A plain `F.linear` on CPU repacks its weight at every call; for a handful of rows that costs more
than the product itself (a bf16 layer at one row: 5.8 ms plain, 2.7 ms packed). Packing keeps a
second copy of the weight. Where the operator is missing or the dtype is not served, the same class
computes with `F.linear`.
"""

from typing import Any

import torch
from torch.nn import functional as F

from draftlab.shapes import Float, Tensor
from draftlab.targets.huge_pages import ask_for_huge_pages

_PACKABLE = (torch.float32, torch.bfloat16)


# overloads are named once: finding them anew at each of a pass's hundred calls takes its time
_LINEAR: Any = None
_LINEAR_AND: Any = None
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    _LINEAR = torch.ops.mkldnn._linear_pointwise.default
    _LINEAR_AND = torch.ops.mkldnn._linear_pointwise.binary


class PackedLinear:
    """y = x W^T + b, with W packed where possible; not a module: nothing here is trained."""

    def __init__(self, weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"] | None) -> None:
        """Pack a weight; the original is kept only where packing is not possible."""
        self.bias = bias
        self.out_features = weight.shape[0]
        self._plain: Tensor | None = weight
        self._packed: Tensor | None = None
        if can_pack(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
            _on_huge_pages(packed)
            self._packed, self._plain = packed, None

    @property
    def is_packed(self) -> bool:
        """True when oneDNN's layout is in use."""
        return self._packed is not None

    def __call__(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N Do"]:
        """Apply the layer."""
        if self._packed is None:
            assert self._plain is not None
            return F.linear(x, self._plain, self.bias)
        return _LINEAR(x, self._packed, self.bias, "none", [], "")

    def add_to(
        self, residual: Float[Tensor, "*N Do"], x: Float[Tensor, "*N D"]
    ) -> Float[Tensor, "*N Do"]:
        """Compute residual + layer(x), in one kernel where packed."""
        if self._packed is None:
            return residual + self(x)
        return _LINEAR_AND(x, residual, self._packed, self.bias, "add")


def can_pack(weight: Float[Tensor, "N D"]) -> bool:
    """Tell whether oneDNN's packed layout serves this weight here."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in _PACKABLE
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _on_huge_pages(packed: Tensor) -> None:
    if hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes"):
        address, size = torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed)
        ask_for_huge_pages(address, size)
