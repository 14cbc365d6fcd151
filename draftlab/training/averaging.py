"""A running mean of the weights, saved and probed in their place."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from draftlab.shapes import Tensor


class WeightAverage:
    """Exponential moving average of named parameters, in their own precision.

    The decay warms up, as `num_updates` lets it in TensorFlow's ExponentialMovingAverage: after
    optimizer step n it is min(decay, (1 + n) / (10 + n)). At its full value from the start, the
    mean of a training that is not far longer than 1 / (1 - decay) steps would mostly be the
    weights that it began with.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Start from the weights as they are.

        Args:
            parameters: what is averaged; the same objects are read at each update.
            decay: weight of the past at most, 0..1.
        """
        self._parameters = parameters
        self._decay = decay
        self.means: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after an optimizer step.

        Args:
            step: its number, 1... over all resumes.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, parameter in self._parameters.items():
            self.means[name].lerp_(parameter, 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the means into the parameters for a while; the weights come back bit for bit."""
        weights = {name: p.detach().clone() for name, p in self._parameters.items()}
        try:
            _copy(self.means, self._parameters)
            yield
        finally:
            _copy(weights, self._parameters)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(source[name])
