"""Attention over our KV buffers, for the transformers path and the fast path alike."""

import torch
from torch.nn import functional as F

from draftlab.shapes import Bool, Float, Tensor


def attend(
    query: Float[Tensor, "R Hq T Dh"],
    keys: Float[Tensor, "R H S Dh"],
    values: Float[Tensor, "R H S Dv"],
    mask: Bool[Tensor, "R 1 GT S"] | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, " Hq"] | None = None,
) -> Float[Tensor, "R T Hq Dv"]:
    """Attend with grouped queries folded into the query axis, so keys are never expanded.

    Args:
        query: Hq = G * H heads; head h uses key head h // G.
        keys: the row's slots, committed and new.
        values: alike.
        mask: True where a query may look, already tiled G times head-major (`tile_mask`); None
            when every query sees every slot.
        scale: multiplies the scores.
        softcap: scores become softcap * tanh(scores / softcap), when given.
        sinks: one extra logit a head that takes part in the softmax and is then dropped.
    """
    r, hq, t, dh = query.shape
    h = keys.shape[1]
    folded = query.reshape(r, h, hq // h * t, dh)
    if softcap is None and sinks is None:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        out = _attend_plainly(folded, keys, values, mask, scale, softcap, sinks)
    return out.reshape(r, hq, t, -1).transpose(1, 2)


def tile_mask(mask: Bool[Tensor, "R T S"], groups: int) -> Bool[Tensor, "R 1 GT S"]:
    """Repeat a mask for the G query heads of a key head, head-major as `attend` folds them."""
    return mask.unsqueeze(1).repeat(1, 1, groups, 1)


def _attend_plainly(
    folded: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = folded @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    accurate = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(-1, dtype=accurate).to(values.dtype) @ values
    r, h, gt, _ = scores.shape
    groups = sinks.shape[0] // h
    column = sinks.view(1, h, groups, 1, 1).expand(r, h, groups, gt // groups, 1)
    with_sink = torch.cat([scores, column.reshape(r, h, gt, 1).to(scores.dtype)], dim=-1)
    probs = with_sink.softmax(-1, dtype=accurate)[..., :-1]
    return probs.to(values.dtype) @ values
