"""From logits to probabilities to tokens. Pure functions; the law is data (law.py).

Read `process` first, then `adjust`, the part of it that greedy decoding needs as well.
"""

from collections.abc import Callable
from functools import cache

import torch

from draftlab.errors import ConfigError, ShapeMismatch
from draftlab.sampling.context import TokenContext
from draftlab.sampling.law import Part, Sampling, SamplingRows
from draftlab.shapes import Float, Int, Tensor

_LIKELIEST = 512


def process(
    logits: Float[Tensor, "*N V"],
    sampling: Sampling | SamplingRows,
    context: TokenContext | None = None,
) -> Float[Tensor, "*N V"]:
    """Compute the law tokens are drawn from, in the order that `Sampling` names.

    At least float32 (float64 stays). Ties: top-k keeps every token tied with the k-th, as
    transformers does; top-p and greedy take the lowest ids first. Greedy rows are one-hot.

    Args:
        logits: of the target; with `SamplingRows` or a context, [R, V] or [R, M, V].
        sampling: one law for all, or one a row.
        context: tokens before each place; needed when the law `reads_context`.

    Raises:
        ConfigError: the law reads the context and none was given.
        ShapeMismatch: rows of logits, law and context do not fit together.
    """
    if logits.ndim == 1:
        return process(logits.unsqueeze(0), sampling, context).squeeze(0)
    rows = _as_rows(logits, sampling)
    logits = adjust(logits, rows, context)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if rows.is_greedy:
        return _one_hot(logits)
    scaled = logits
    if rows.divisors is not None:
        scaled = logits / _by_row(rows.divisors, logits)
    scaled = _change(rows.top_k, scaled, _keep_top_k)
    scaled = _change(rows.top_p, scaled, _keep_top_p)
    probs = _change(rows.min_p, scaled.softmax(-1), _keep_min_p)
    if rows.greedy is not None and rows.greedy.rows is not None:
        points = _one_hot(logits[rows.greedy.rows])
        probs = probs.index_copy(0, rows.greedy.rows, points)
    return probs


def adjust(
    logits: Float[Tensor, "*N V"],
    sampling: Sampling | SamplingRows,
    context: TokenContext | None = None,
) -> Float[Tensor, "*N V"]:
    """Apply bias, penalties and the ban on end tokens: all that greedy decoding needs.

    The very same tensor comes back when none of them is on. Arguments are those of `process`.
    """
    rows = _as_rows(logits, sampling)
    if not rows.adjusts:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = _change(rows.bias, logits, _add_bias)
    if not rows.reads_context:
        return logits
    seen = _check_context(logits, context)
    logits = _change(
        rows.penalties,
        logits,
        lambda part, chosen: _penalise(part, chosen, seen.of_rows(part.rows)),
    )
    return _change(
        rows.min_new_tokens,
        logits,
        lambda part, chosen: _ban_eos(part, chosen, seen.of_rows(part.rows)),
    )


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
    index = torch.searchsorted(cumulative, threshold, right=True)
    # rounding can put u * total at the total itself: then the id that reaches it is right
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous())
    return torch.minimum(index, last).squeeze(-1)


def residual(p: Float[Tensor, "*N V"], q: Float[Tensor, "*N V"]) -> Float[Tensor, "*N V"]:
    """Compute (p - q)+, not normalised; p itself where nothing is left.

    Nothing is left only by rounding, when q = p to the last bit: a rejection had probability 0.
    """
    left = (p - q).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, p)


@cache
def _rows_of_one(law: Sampling, device: torch.device) -> SamplingRows:
    """Build the tensors of one law once: a single row is broadcast over all.

    Some hundred bytes a law, never dropped: a captured round keeps reading them.
    """
    return SamplingRows.of([law], device)


def _as_rows(logits: Tensor, sampling: Sampling | SamplingRows) -> SamplingRows:
    if isinstance(sampling, Sampling):
        return _rows_of_one(sampling, logits.device)
    if len(sampling.laws) not in (1, logits.shape[0]):
        raise ShapeMismatch(
            f"{len(sampling.laws)} laws for logits of shape {tuple(logits.shape)}; expected one a "
            "row, rows first"
        )
    return sampling


def _check_context(logits: Tensor, context: TokenContext | None) -> TokenContext:
    if context is None:
        raise ConfigError(
            "penalties and min_new_tokens need the tokens before each place, and no context was "
            "given; a drafter draws by `sampling.context_free`"
        )
    places = logits.shape[:2] if logits.ndim == 3 else (logits.shape[0], 1)
    if context.num_emitted.shape != places or logits.ndim > 3:
        raise ShapeMismatch(
            f"a context of {tuple(context.num_emitted.shape)} places does not fit logits of shape "
            f"{tuple(logits.shape)}; expected [R, V] or [R, M, V]"
        )
    return context


def _change(part: Part | None, values: Tensor, change: Callable[[Part, Tensor], Tensor]) -> Tensor:
    """Change the rows of a part, and pay for those alone."""
    if part is None:
        return values
    if part.rows is None:
        return change(part, values)
    return values.index_copy(0, part.rows, change(part, values[part.rows]))


def _by_row(values: Tensor, logits: Tensor) -> Tensor:
    """Shape one value a row so that it meets its row's logits, in their precision."""
    return values.to(logits.dtype).view(-1, *[1] * (logits.ndim - 1))


def _one_hot(logits: Tensor) -> Tensor:
    return torch.zeros_like(logits).scatter_(-1, greedy_ids(logits).unsqueeze(-1), 1.0)


def _add_bias(part: Part, logits: Tensor) -> Tensor:
    assert part.ids is not None
    lead = [1] * (logits.ndim - 2)
    shape = (*logits.shape[:-1], part.ids.shape[1])
    ids = part.ids.view(-1, *lead, part.ids.shape[1]).expand(shape)
    values = part.values.to(logits.dtype).view(-1, *lead, part.ids.shape[1]).expand(shape)
    return logits.scatter_add(-1, ids, values)


def _penalise(part: Part, logits: Tensor, context: TokenContext) -> Tensor:
    wide = logits if logits.ndim == 3 else logits.unsqueeze(1)
    repetition, frequency, presence = (_by_row(v, wide) for v in part.values.unbind(1))
    tokens, is_seen, counts = context.list_tokens()
    index = tokens.unsqueeze(1).expand(-1, wide.shape[1], -1)
    before = wide.gather(2, index)
    after = torch.where(before > 0, before / repetition, before * repetition)
    after = after - frequency * counts - presence * (counts > 0)
    # a token listed twice is written twice with one value
    return wide.scatter(2, index, torch.where(is_seen, after, before)).view_as(logits)


def _ban_eos(part: Part, logits: Tensor, context: TokenContext) -> Tensor:
    is_early = (context.num_emitted < part.values).view(*logits.shape[:-1], 1)
    ends = logits.index_select(-1, context.eos_ids)
    return logits.index_copy(-1, context.eos_ids, ends.masked_fill(is_early, -torch.inf))


def _keep_top_k(part: Part, logits: Tensor) -> Tensor:
    size = logits.shape[-1]
    largest = logits.topk(min(int(part.largest), size), dim=-1).values
    place = part.values.long().clamp_max(size) - 1
    place = place.view(-1, *[1] * (logits.ndim - 1)).expand(*logits.shape[:-1], 1)
    return logits.masked_fill(logits < largest.gather(-1, place), -torch.inf)


def _keep_top_p(part: Part, logits: Tensor) -> Tensor:
    probs = logits.softmax(-1)
    wanted = _by_row(part.values.squeeze(1), logits)
    ordered, mass = _order_by_mass(probs, wanted)
    count = (mass - ordered < wanted).sum(-1, keepdim=True)
    least = ordered.gather(-1, count - 1)
    # of those that tie with the least likely one kept, the lowest ids stay
    is_more, is_tied = probs > least, probs == least
    room = count - is_more.sum(-1, keepdim=True)
    kept = is_more | (is_tied & (is_tied.cumsum(-1) <= room))
    return logits.masked_fill(~kept, -torch.inf)


def _order_by_mass(probs: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Sort probabilities, the largest first, and sum them up, as far as the wanted mass needs.

    A sort of a whole vocabulary takes a CPU longer than a small target's pass. A few hundred of the
    likeliest are nearly always enough, and their sums are the same to the bit.
    """
    if probs.device.type == "cpu" and probs.shape[-1] > _LIKELIEST:
        ordered = probs.topk(_LIKELIEST, dim=-1).values
        mass = ordered.cumsum(-1)
        if bool((mass[..., -1:] >= wanted).all()):
            return ordered, mass
    ordered = probs.sort(dim=-1, descending=True).values
    return ordered, ordered.cumsum(-1)


def _keep_min_p(part: Part, probs: Tensor) -> Tensor:
    floor = _by_row(part.values.squeeze(1), probs) * probs.max(-1, keepdim=True).values
    probs = probs.masked_fill(probs < floor, 0.0)
    return probs / probs.sum(-1, keepdim=True)
