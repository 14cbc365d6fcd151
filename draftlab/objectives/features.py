"""How far a predicted hidden state is from the target's own.

In: states of N predictions. Out: one number a row, to weigh like any other loss.
"""

import torch
from torch.nn import functional as F

from draftlab.shapes import Float, Tensor


def smooth_l1(predicted: Float[Tensor, "N D"], true: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
    """Compute the mean over D of d^2 / 2 below 1 and |d| - 1/2 above (EAGLE, arXiv:2401.15077).

    In float32: half precision would round small differences of large states away.
    """
    wide = predicted.to(_wide(predicted, true))
    return F.smooth_l1_loss(wide, true.detach().to(wide.dtype), reduction="none").mean(-1)


def _wide(*tensors: Tensor) -> torch.dtype:
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
