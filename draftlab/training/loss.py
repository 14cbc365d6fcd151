"""The module Accelerate wraps: a drafter's loss, with every parameter taking part."""

import torch
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import Drafter, DraftLoss
from draftlab.randomness import Noise
from draftlab.shapes import Float, Tensor
from draftlab.targets.features import TargetFeatures


class DrafterLoss(nn.Module):
    """Computes the loss of a batch, called through the wrapper only.

    Every parameter enters the graph with weight zero, so that the processes of a group reduce the
    same gradients whatever their rows hold: a batch with nothing to learn, or too short for the
    deepest head, neither hangs the others (case O-21) nor changes what a step does.
    """

    def __init__(self, drafter: Drafter) -> None:
        """Keep the drafter itself; its forward is not patched."""
        super().__init__()
        self.drafter = drafter

    def forward(
        self, batch: TokenBatch, features: TargetFeatures | None, noise: Noise
    ) -> tuple[Float[Tensor, ""], DraftLoss | None]:
        """Compute the sum of the sequences' losses, and the figures behind it.

        Args:
            batch: token rows.
            features: the target's hidden states, or None when the batch has nothing to learn.
            noise: all randomness.
        """
        nothing = sum(p.flatten()[:1].sum() for p in self.drafter.parameters() if p.requires_grad)
        nothing = torch.as_tensor(nothing) * 0.0
        if features is None:
            return nothing, None
        loss = self.drafter(batch, features, noise)
        return loss.total + nothing, loss
