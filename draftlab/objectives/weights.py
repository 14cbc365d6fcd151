"""What every prediction of a chain counts: `decayed` by depth, or by how far it is from reached.

In: which of the K predictions that start at one place count. Out: their weights. A prediction
counts when the token *predicted* is learned (case O-06); who makes `counts` sees to that.
"""

import torch

from draftlab.shapes import Bool, Float, Int, Tensor


def decayed(counts: Bool[Tensor, "K N"], decay: float) -> Float[Tensor, "K N"]:
    """Weigh depth k by decay ** k; 0 where nothing counts.

    Args:
        counts: True where depth k makes prediction n.
        decay: weight of a depth relative to the one before it, above 0.
    """
    depths = torch.arange(counts.shape[0], device=counts.device, dtype=torch.float64)
    return counts * (decay**depths).unsqueeze(1)


def d_pace(
    label_probs: Float[Tensor, "K N"], counts: Bool[Tensor, "K N"], alpha: float = 0.5
) -> Float[Tensor, "K N"]:
    """Weigh depth k by the chance that it, or a later one, is reached (D-PACE, arXiv:2605.18810).

    w_k = sum over j >= k of prod over i <= j of s_i, where s_i = (1 - alpha) + alpha * q_i(data
    token): a smoothed chance that depth i is accepted. Not differentiated.

    Args:
        label_probs: q of the data token at depth k of the chain that starts at place n.
        counts: True where there is such a prediction that counts; others neither shorten nor
            lengthen a chain.
        alpha: 0 gives fixed weights K - k, 1 trusts q as it is.
    """
    chance = (1 - alpha) + alpha * label_probs.detach()
    reached = torch.where(counts, chance, 1.0).cumprod(0) * counts
    return reached.flip(0).cumsum(0).flip(0) * counts


def by_place(
    values: Float[Tensor, "K N"], places: Int[Tensor, "K N"], num_places: int
) -> Float[Tensor, "K M"]:
    """Sort values of predictions by the place their chain starts at; 0 where there is none.

    Args:
        values: of predictions of token n at depth k; 0 where there is no such prediction.
        places: where the chain of each starts, unique within a depth among those that are.
        num_places: M.
    """
    out = values.new_zeros(values.shape[0], num_places)
    return out.scatter_add_(1, places, values)
