"""Objectives that aim at acceptance itself: sum_v min(p, q), the chance that a draw from q is kept.

In: log p and log q over the same C tokens, float32 or wider. Out: one number a row, at least 0.
`lk_hybrid` and `neg_log_acceptance` are the LK losses (arXiv:2602.23881).
"""

import torch

from draftlab.objectives.distillation import forward_kl
from draftlab.shapes import Float, Tensor


def overlap(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Compute sum_v min(p, q), 0..1: expected acceptance of a sampled draft token."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def tv(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Compute the total variation distance 1 - sum_v min(p, q); little gradient far from p."""
    return 1 - overlap(log_p, log_q)


def neg_log_acceptance(
    log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]
) -> Float[Tensor, " N"]:
    """Compute -log sum_v min(p, q)."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def lk_hybrid(log_p: Float[Tensor, "N C"], log_q: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Mix w * KL + (1 - w) * TV with w = exp(-3 a), a the row's own overlap, not differentiated."""
    distance = tv(log_p, log_q)
    weight = torch.exp(-3 * (1 - distance.detach()))
    return weight * forward_kl(log_p, log_q) + (1 - weight) * distance
