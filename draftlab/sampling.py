"""From logits to the law a token is drawn from, and the draw itself. Pure functions.

In: logits and a `Sampling`. Out: probabilities, ids, residuals. The same `process` serves the
autoregressive baseline, verification and drafters, so p means one thing everywhere.
"""

from dataclasses import dataclass

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target is sampled. Temperature 0 is greedy decoding; None switches a filter off."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that name no law."""
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature}: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: expected 1 or more, or null")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0.0 < value <= 1.0:
                raise ConfigError(f"{name}={value}: expected a number in (0, 1], or null")
        if self.is_greedy and (self.top_k, self.top_p, self.min_p) != (None, None, None):
            raise ConfigError("top_k, top_p and min_p cannot take effect at temperature 0")

    @property
    def is_greedy(self) -> bool:
        """True when the law is a point mass on the largest logit."""
        return self.temperature == 0.0


GREEDY = Sampling()


def process(logits: Float[Tensor, "*N V"], sampling: Sampling) -> Float[Tensor, "*N V"]:
    """Compute the law tokens are drawn from: temperature, top-k, top-p, min-p, softmax.

    At least float32 (float64 stays). Ties: top-k keeps every token tied with the k-th, as
    transformers does; greedy takes the lowest id. Greedy gives one-hot rows.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, greedy_ids(logits).unsqueeze(-1), 1.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = torch.zeros_like(mass_before, dtype=torch.bool)
        dropped.scatter_(-1, order, mass_before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    probs = logits.softmax(-1)
    if sampling.min_p is not None:
        floor = sampling.min_p * probs.max(-1, keepdim=True).values
        probs = probs.masked_fill(probs < floor, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def greedy_ids(logits: Float[Tensor, "*N V"]) -> Int[Tensor, "*N"]:
    """Take the largest logit, the lowest id among ties."""
    return logits.argmax(-1)


def draw(probs: Float[Tensor, "*N V"], uniforms: Float[Tensor, "*N"]) -> Int[Tensor, "*N"]:
    """Draw one token a row by inverse CDF: the first id whose cumulative mass exceeds u.

    Rows need not be normalised. Ids without mass cannot come out, whatever u in [0, 1) is
    (`torch.multinomial` has returned zero-mass ids for years, hazard H16).
    """
    cumulative = probs.to(torch.float64).cumsum(-1)
    threshold = uniforms.to(torch.float64).unsqueeze(-1) * cumulative[..., -1:]
    # rounding can put u * total at the total itself: the last id with mass is the right answer then
    last = (probs > 0).to(torch.int8) * torch.arange(
        1, probs.shape[-1] + 1, device=probs.device, dtype=torch.int64
    )
    index = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return torch.minimum(index, last.max(-1).values - 1)


def residual(p: Float[Tensor, "*N V"], q: Float[Tensor, "*N V"]) -> Float[Tensor, "*N V"]:
    """Compute (p - q)+, not normalised; p itself where nothing is left.

    Nothing is left only by rounding, when q = p to the last bit: a rejection had probability 0.
    """
    left = (p - q).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
