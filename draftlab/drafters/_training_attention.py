"""How a drafter's rows attend while training: to a span of context, and to a few keys of their own.

attend_unrolled: row t at depth s sees the depth-0 keys of its span, and of depths 1..s those of row
t alone. attend_blocks: a slot sees its span, and the slots of its own block. The context is read
once, which gives what it says and how much it weighs (the log of the sum of its exponentials);
it then counts as one key more among the row's own. So no matrix of T x kT, nor T x T, exists.

The context is read by FlexAttention on GPUs, elsewhere piece by piece; see read_context.
"""

import os
import shutil
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from draftlab.drafters._spans import Piece, Spans
from draftlab.shapes import Float, Tensor


def attend_unrolled(
    queries: Float[Tensor, "B A Hq Dh"],
    keys: Float[Tensor, "B T H Dh"],
    values: Float[Tensor, "B T H Dh"],
    spans: Spans,
    own: list[tuple[Float[Tensor, "B A H Dh"], Float[Tensor, "B A H Dh"]]],
) -> Float[Tensor, "B A HqDh"]:
    """Attend as a draft row does: to what came before by true taps, and to its own later steps.

    Args:
        queries: of the rows trained.
        keys: of depth 0, all positions.
        values: alike.
        spans: which depth-0 positions a row sees; at least one.
        own: keys and values of depths 1..s.
    """
    queries, keys, values = _cast(queries), _cast(keys), _cast(values)
    mixed, weight = read_context(queries, keys, values, spans)
    if not own:
        return mixed.flatten(2)
    grouped = queries.unflatten(2, (keys.shape[2], -1)) * queries.shape[3] ** -0.5
    pairs = [(_cast(k).unsqueeze(3), _cast(v).unsqueeze(3)) for k, v in own]
    scores = torch.stack([(grouped * k).sum(-1) for k, _ in pairs], dim=-1)
    kept, shares = _share(weight.unflatten(2, (keys.shape[2], -1)), scores, values.dtype)
    mixed = mixed.unflatten(2, (keys.shape[2], -1)) * kept
    for step, (_, v) in enumerate(pairs):
        mixed = mixed + shares[..., step : step + 1] * v
    return mixed.flatten(2)


def attend_blocks(
    queries: Float[Tensor, "B A S Hq Dh"],
    context: tuple[Float[Tensor, "B T H Dh"], Float[Tensor, "B T H Dh"]],
    own: tuple[Float[Tensor, "B A S H Dh"], Float[Tensor, "B A S H Dh"]],
    spans: Spans,
    *,
    causal: bool,
) -> Float[Tensor, "B A S HqDh"]:
    """Attend as blocks do: to the context before their anchor and to themselves, to no other block.

    Args:
        queries: of all slots of all blocks.
        context: keys and values of positions.
        own: keys and values of the blocks.
        spans: which positions a slot sees, block after block; none is fine.
        causal: a slot sees only the slots up to itself.
    """
    queries, keys, values = _cast(queries), _cast(context[0]), _cast(context[1])
    slots, heads = queries.shape[2], (keys.shape[2], -1)
    mixed, weight = read_context(queries.flatten(1, 2), keys, values, spans)
    # B A H G S Dh; a key head's queries, G and S, are rows of one product
    grouped = queries.unflatten(3, heads).permute(0, 1, 3, 4, 2, 5) * queries.shape[4] ** -0.5
    near = grouped.flatten(3, 4) @ _cast(own[0]).permute(0, 1, 3, 4, 2)
    near = near.unflatten(3, (-1, slots))
    if causal:
        seen = torch.ones(slots, slots, dtype=torch.bool, device=near.device).tril()
        near = near.masked_fill(~seen, -torch.inf)
    by_slot = weight.unflatten(1, (-1, slots)).unflatten(3, heads).permute(0, 1, 3, 4, 2)
    kept, shares = _share(by_slot, near, values.dtype)
    said = shares.flatten(3, 4) @ _cast(own[1]).transpose(2, 3)
    said = said.unflatten(3, (-1, slots)).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
    kept = kept.permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
    return (mixed.unflatten(1, (-1, slots)) * kept + said).flatten(3)


def _share(weight: Tensor, scores: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a row's attention between its context and its own keys, which have these scores."""
    both = torch.cat([weight.unsqueeze(-1), scores.to(weight.dtype)], dim=-1)
    kept, shares = both.softmax(-1).to(dtype).tensor_split([1], dim=-1)
    return kept, shares


def _cast(x: Tensor) -> Tensor:
    """Take part in autocast, which knows no function of ours."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def read_context(
    queries: Float[Tensor, "B A Hq Dh"],
    keys: Float[Tensor, "B T H Dh"],
    values: Float[Tensor, "B T H Dv"],
    spans: Spans,
) -> tuple[Float[Tensor, "B A Hq Dv"], Float[Tensor, "B A Hq"]]:
    """Attend to spans; give the result and the log of the sum of the exponentials of the scores.

    Rows that see nothing give 0 and -inf. Both results carry gradients.

    Args:
        queries: Hq = G * H heads; head h uses key head h // G.
        keys: of all positions.
        values: alike.
        spans: which positions a row sees.
    """
    if context_reader(queries.device, queries.dtype, queries.shape[3]) == "flex":
        return read_by_flex(queries, keys, values, spans)
    return read_by_pieces(queries, keys, values, spans)


def context_reader(
    device: torch.device, dtype: torch.dtype, width: int
) -> Literal["flex", "pieces"]:
    """Name what reads the context: flex where its GPU kernels serve, pieces everywhere else.

    Args:
        device: of the queries.
        dtype: of the queries, after autocast.
        width: of a head.
    """
    is_served = device.type == "cuda" and dtype != torch.float64 and width >= 16
    return "flex" if is_served and has_compiler() else "pieces"


# ---------------------------------------------------------------- FlexAttention


@cache
def has_compiler() -> bool:
    """Tell whether GPU kernels can be built here: Triton needs a C compiler as well."""
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(shutil.which(c) for c in compilers if c)


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def read_by_flex(
    queries: Float[Tensor, "B A Hq Dh"],
    keys: Float[Tensor, "B T H Dh"],
    values: Float[Tensor, "B T H Dv"],
    spans: Spans,
) -> tuple[Float[Tensor, "B A Hq Dv"], Float[Tensor, "B A Hq"]]:
    """Do what `read_context` does in one kernel that skips the tiles nobody looks at.

    It is compiled on GPUs; elsewhere it runs as it is, which is slow and has no gradients.
    """
    attend = _compiled_flex() if queries.is_cuda else flex_attention
    mixed, more = attend(
        queries.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        block_mask=spans.block_mask,
        scale=queries.shape[3] ** -0.5,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert more.lse is not None, "asked for, so given"
    return mixed.transpose(1, 2), more.lse.transpose(1, 2)


# ---------------------------------------------------------------- pieces


def read_by_pieces(
    queries: Float[Tensor, "B A Hq Dh"],
    keys: Float[Tensor, "B T H Dh"],
    values: Float[Tensor, "B T H Dv"],
    spans: Spans,
) -> tuple[Float[Tensor, "B A Hq Dv"], Float[Tensor, "B A Hq"]]:
    """Do what `read_context` does for a few rows at a time, with plain operations.

    Only the keys between the ends of a piece's rows take part. Scores are forgotten and computed
    again for the gradients, in the same order every time.

    On one core, forward and backward in ms of CPU time against one dense matrix, 9 query heads on 3
    key heads of 64, 60 % of the rows, 3 depths: 4 x 512 of samples of 170: 201 against 337; 4 x 512
    of one sample each: 285 against 306; 1 x 4096 of samples of 512: 685 against 8,587; of one:
    3,849 against 8,304. Blocks, 200 of 8 slots in 4 x 512: 240 against 978. So one way serves all.
    """
    mixed, weight = _ByPieces.apply(queries, keys, values, spans)
    return mixed, weight


class _ByPieces(torch.autograd.Function):
    """Softmax over spans; its gradients come from scores computed once more."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        """Attend, a piece after the other."""
        wide = torch.promote_types(queries.dtype, torch.float32)
        kv_heads, scale = keys.shape[2], queries.shape[3] ** -0.5
        mixed = values.new_zeros(*queries.shape[:3], values.shape[3])
        weight = queries.new_full(queries.shape[:3], -torch.inf, dtype=wide)
        with torch.autocast(queries.device.type, enabled=False):
            folded_keys, folded_values = _by_head(keys), _by_head(values)
            for piece in spans.pieces:
                b, near = piece.batch_row, slice(piece.start, piece.stop)
                q = _fold(queries, piece, kv_heads) * scale
                scores = _scores(q, folded_keys, piece, spans).to(wide)
                # a row that sees nothing here has -inf everywhere
                top = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(wide).min)
                powers = scores.sub_(top).exp_()
                total = powers.sum(-1, keepdim=True)
                said = torch.bmm(powers.to(values.dtype), folded_values[b, :, near])
                said = said / total.clamp_min(torch.finfo(wide).tiny).to(said.dtype)
                _unfold(mixed, piece, said)
                _unfold(weight.unsqueeze(3), piece, top + total.log())
        ctx.save_for_backward(queries, keys, values, mixed, weight)
        ctx.spans = spans
        return mixed, weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Give the gradients of both results."""
        queries, keys, values, mixed, weight = ctx.saved_tensors
        spans, kv_heads, scale = ctx.spans, keys.shape[2], queries.shape[3] ** -0.5
        grad_mixed, grad_weight = grads
        wide = weight.dtype
        grad_queries = torch.zeros_like(queries)
        with torch.autocast(queries.device.type, enabled=False):
            folded_keys, folded_values = _by_head(keys), _by_head(values)
            grad_keys, grad_values = (
                torch.zeros_like(x, dtype=wide) for x in (folded_keys, folded_values)
            )
            # of the softmax's gradient: what all scores of a row have in common
            common = (grad_mixed * mixed).sum(-1, dtype=wide) - grad_weight
            known = weight.masked_fill(weight == -torch.inf, 0.0)
            for piece in spans.pieces:
                b, near = piece.batch_row, slice(piece.start, piece.stop)
                q = _fold(queries, piece, kv_heads) * scale
                g = _fold(grad_mixed, piece, kv_heads)
                scores = _scores(q, folded_keys, piece, spans).to(wide)
                probs = scores.sub_(_fold(known.unsqueeze(3), piece, kv_heads)).exp_()
                grad_values[b, :, near] += torch.bmm(probs.to(g.dtype).transpose(1, 2), g)
                grad = torch.bmm(g, folded_values[b, :, near].transpose(1, 2)).to(wide)
                grad.sub_(_fold(common.unsqueeze(3), piece, kv_heads)).mul_(probs)
                grad = grad.to(q.dtype)
                grad_keys[b, :, near] += torch.bmm(grad.transpose(1, 2), q)
                _unfold(grad_queries, piece, torch.bmm(grad, folded_keys[b, :, near]) * scale)
        return (
            grad_queries,
            grad_keys.transpose(1, 2).to(keys.dtype),
            grad_values.transpose(1, 2).to(values.dtype),
            None,
        )


def _by_head(x: Tensor) -> Tensor:
    """[B T H D] -> [B H T D], each head's positions together."""
    return x.transpose(1, 2).contiguous()


def _fold(x: Tensor, piece: Piece, kv_heads: int) -> Tensor:
    """Take a piece's N rows of [B A Hq D] as [H GN D]: a key head's rows are one product."""
    rows = x[piece.batch_row].index_select(0, piece.rows)
    return rows.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _unfold(out: Tensor, piece: Piece, folded: Tensor) -> None:
    """Put [H GN D] where `_fold` took it from."""
    rows = folded.unflatten(1, (-1, piece.rows.shape[0])).permute(2, 0, 1, 3).flatten(1, 2)
    out[piece.batch_row].index_copy_(0, piece.rows, rows)


def _scores(q: Tensor, keys: Tensor, piece: Piece, spans: Spans) -> Tensor:
    """Compare queries with the keys of a piece; -inf where a row does not look."""
    b, start, stop = piece.batch_row, piece.start, piece.stop
    scores = torch.bmm(q, keys[b, :, start:stop].transpose(1, 2))
    by_row = scores.unflatten(1, (-1, piece.rows.shape[0]))
    if piece.all_from > start:
        near = torch.arange(start, min(piece.all_from, stop), device=q.device)
        hidden = near < spans.first[b, piece.rows].unsqueeze(1)
        by_row[..., : near.shape[0]].masked_fill_(hidden, -torch.inf)
    if piece.all_until < stop:
        near = torch.arange(max(piece.all_until, start), stop, device=q.device)
        hidden = near >= spans.end[b, piece.rows].unsqueeze(1)
        by_row[..., -near.shape[0] :].masked_fill_(hidden, -torch.inf)
    return scores
