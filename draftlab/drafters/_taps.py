"""Which hidden states of the target a drafter reads, and how those of one position are laid out."""

import torch
from pydantic import PositiveInt, field_validator
from torch import nn

from draftlab.drafters._weighing import StepLossSettings
from draftlab.shapes import Float, Tensor


class TapSettings(StepLossSettings):
    """Settings of drafters with decoder layers of their own over taps of the target.

    Attributes:
        tap_layers: taps to read, ascending; None means the kind's default.
        num_layers: decoder layers.
        intermediate_size: width of their MLPs; None means the target's.
        sliding_window: positions a row may look back to, itself included; None means all.
    """

    tap_layers: tuple[int, ...] | None
    num_layers: PositiveInt
    intermediate_size: PositiveInt | None
    sliding_window: PositiveInt | None

    @field_validator("tap_layers")
    @classmethod
    def _check_taps(cls, taps: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if taps is not None and not taps:
            raise ValueError("expected at least one tap, or null for the default")
        return taps


def side_by_side(
    taps: Float[Tensor, "*N L D"], norms: nn.ModuleList | None
) -> Float[Tensor, "*N LD"]:
    """Join the taps of a position end to end, each through its own norm where there are norms."""
    if norms is not None:
        normed = [norm(taps[..., i, :]) for i, norm in enumerate(norms)]
        taps = torch.stack(normed, dim=-2)
    return taps.flatten(-2)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Choose a low, a middle and a high tap: 2, L // 2, L - 3, as every server does by default.

    Below seven layers these would meet, so there: the first, the middle and the last.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))
