"""Which tokens a draft model of little room should learn (AdaSPEC, arXiv:2510.19779)."""

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Bool, Float, Int, Tensor


def most_learnable(
    draft_losses: Float[Tensor, " N"],
    reference_losses: Float[Tensor, " N"],
    sequences: Int[Tensor, " N"],
    fraction: float,
) -> Bool[Tensor, " N"]:
    """Choose, in every sequence, the tokens where the draft is furthest behind a reference.

    The reference is a copy of the draft that was distilled on all tokens before: what it could not
    learn either is left alone. Both losses are distances to the same target law. The paper chooses
    among the tokens of a batch, so its choice hangs on batch-mates; within a sequence it does not,
    and any cut into batches and processes chooses the same.

    Args:
        draft_losses: of the draft as it is now, one a token.
        reference_losses: of the trained reference, at the same tokens.
        sequences: number of the sequence of each token, 0 or more.
        fraction: share of a sequence's tokens to keep, above 0 and at most 1; at least one is kept.

    Raises:
        ConfigError: `fraction` is no share.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction}: expected a share of tokens above 0, at most 1")
    order = (draft_losses - reference_losses).detach().argsort(descending=True, stable=True)
    order = order[sequences[order].argsort(stable=True)]  # by sequence, the largest gaps first
    lengths = sequences.bincount()
    kept = (fraction * lengths.double()).round().long().clamp_min(1)
    own = sequences[order]
    place = torch.arange(own.shape[0], device=own.device) - (lengths.cumsum(0) - lengths)[own]
    chosen = torch.zeros_like(own, dtype=torch.bool)
    chosen[order] = place < kept[own]
    return chosen
