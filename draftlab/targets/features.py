"""What a drafter may read of a target pass: which hidden states, and the tensors themselves.

Tap numbering, used everywhere in draftlab: tap k is the residual stream after k decoder layers,
before the final norm, k in 1..num_layers. That is `hidden_states[k]` of transformers for
k < num_layers, and what vLLM calls auxiliary hidden state k.
"""

from dataclasses import dataclass

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Float, Tensor


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Hidden states a drafter needs. The target and the feature store obey.

    Attributes:
        tap_layers: taps in ascending order, each in 1..num_layers; may be empty.
        wants_final: also the final hidden state (after the final norm: the LM head's input).
    """

    tap_layers: tuple[int, ...] = ()
    wants_final: bool = False

    def check(self, num_layers: int) -> None:
        """Refuse taps that the target does not have.

        Raises:
            ConfigError: out of range, unordered or repeated taps (case O-17).
        """
        taps = self.tap_layers
        if list(taps) != sorted(set(taps)) or any(not 1 <= k <= num_layers for k in taps):
            raise ConfigError(
                f"tap_layers={list(taps)}: expected ascending, distinct numbers in 1..{num_layers} "
                "(tap k is the residual stream after k decoder layers)"
            )

    def union(self, other: "FeatureRequest") -> "FeatureRequest":
        """Give the smallest request that serves both."""
        taps = tuple(sorted(set(self.tap_layers) | set(other.tap_layers)))
        return FeatureRequest(taps, self.wants_final or other.wants_final)


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """Hidden states of a target pass over B rows of T positions.

    Attributes:
        taps: the tapped layers in ascending order, or None when none were asked for.
        final: after the final norm, the input of the LM head; or None when not asked for.
    """

    taps: Float[Tensor, "B T L D"] | None
    final: Float[Tensor, "B T D"] | None

    def to(self, device: torch.device) -> "TargetFeatures":
        """Move to a device."""
        taps, final = self.taps, self.final
        return TargetFeatures(
            taps=None if taps is None else taps.to(device),
            final=None if final is None else final.to(device),
        )
