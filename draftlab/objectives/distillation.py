"""How far the draft law q is from the target law p, row by row, in log space.

In: log p and log q over the same C tokens, float32 or wider. Out: one number a row, at least 0.
All but `top_k` are 0 where the laws are equal.
`forward_kl` is the safe default; acceptance.py has those that aim at acceptance itself.
"""

import math

import torch

from draftlab.shapes import Float, Tensor

_NUM_LIKELY = 10


def forward_kl(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Compute KL(p || q): q must cover whatever the target may say."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Compute KL(q || p): q seeks the target's largest mode (DistillSpec, arXiv:2310.08461)."""
    return forward_kl(log_q, log_p)


def jsd(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Compute the Jensen-Shannon divergence, 0..log 2."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (forward_kl(log_p, log_m) + forward_kl(log_q, log_m))


def top_k(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Compute -sum p log q over the target's 10 likeliest tokens (HASS, arXiv:2408.15766).

    Its least value is not 0 but what p itself scores; an addition to another objective.
    """
    likely, columns = log_p.topk(min(_NUM_LIKELY, log_p.shape[-1]), dim=-1)
    return -(likely.exp() * log_q.gather(-1, columns)).sum(-1)
