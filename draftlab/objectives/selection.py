"""Which tokens a draft model of little room should learn (AdaSPEC, arXiv:2510.19779)."""

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Bool, Float, Tensor


def most_learnable(
    draft_losses: Float[Tensor, " N"],
    reference_losses: Float[Tensor, " N"],
    fraction: float,
) -> Bool[Tensor, " N"]:
    """Choose the tokens where the draft is furthest behind a reference of the same size.

    The reference is a copy of the draft that was distilled on all tokens before: what it could not
    learn either is left alone. Both losses are distances to the same target law.

    Args:
        draft_losses: of the draft as it is now, one a token.
        reference_losses: of the trained reference, at the same tokens.
        fraction: share of tokens to keep, above 0 and at most 1; at least one is kept.

    Raises:
        ConfigError: `fraction` is no share.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction}: expected a share of tokens above 0, at most 1")
    count = draft_losses.shape[0]
    kept = min(count, max(1, round(fraction * count)))
    gaps = (draft_losses - reference_losses).detach()
    chosen = torch.zeros(count, dtype=torch.bool, device=gaps.device)
    chosen[gaps.argsort(descending=True, stable=True)[:kept]] = True
    return chosen
