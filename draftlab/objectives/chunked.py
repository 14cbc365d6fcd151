"""Loss of many predictions without ever holding their logits: both heads run chunk by chunk.

In: hidden states before both heads. Out: a total to call backward on, and sums per depth.
Full-vocabulary float32 logits of every depth are what runs out of memory first (case O-25), so
the gradient of a chunk is taken while its logits are alive, and only gradients of hidden states and
head weights are kept. The target's head runs once a row, whatever the number of depths; with a
reduced draft vocabulary only its kept rows do, and the whole head judges a part of the rows: it
would cost more than all else together, and only for the figures. A prediction of weight 0 meets
neither head (pieces.py).

Beside inputs, parameters and their gradients only one chunk is alive: gradients are added up in
place, in float32 or wider, and heads of another dtype than the work's are cast a slice at a time.
rows.py is the plain form of all this, and its oracle. Read chunked_scores first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftlab.objectives.acceptance import overlap
from draftlab.objectives.cross_entropy import cross_entropy
from draftlab.objectives.named import Objective
from draftlab.objectives.pieces import Chunk, Piece, cut_into_pieces
from draftlab.objectives.rows import (
    LOG_OF_NOTHING,
    Teacher,
    columns_of,
    compute_losses,
    read_teacher,
)
from draftlab.shapes import Bool, Float, Int, Tensor

# numbers alive at once in a chunk; on a CPU larger chunks are no faster: glibc stops reusing pages
_ALIVE_ON_CPU = 20_000_000
_ALIVE_ELSEWHERE = 160_000_000
_LEAST_ROWS = 32  # below, reading the heads again and again costs more than the numbers alive
_JUDGED_AT_ONCE = 128
_CAST_AT_ONCE = 16_000_000  # numbers of a head that is cast, or whose gradient is


@dataclass(frozen=True, slots=True)
class DepthScores:
    """Sums over N predictions at each of K depths; all but `total` over the judged ones.

    Attributes:
        total: sum of weighted losses of all predictions; the only one with a gradient.
        loss_sum: unweighted losses of predictions that count: those of a weight above 0.
        hit_sum: those whose argmax is the target's.
        overlap_sum: their sum_v min(p, q).
        count: how many count.
    """

    total: Float[Tensor, ""]
    loss_sum: Float[Tensor, " K"]
    hit_sum: Float[Tensor, " K"]
    overlap_sum: Float[Tensor, " K"]
    count: Float[Tensor, " K"]


def chunked_scores(
    objective: Objective,
    hidden: Float[Tensor, "K N D"],
    heads: Sequence[Float[Tensor, "C D"]],
    *,
    target_final: Float[Tensor, "N Dt"],
    target_head: Callable[[Float[Tensor, "M Dt"]], Float[Tensor, "M V"]],
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, "K N"],
    vocab_ids: Int[Tensor, " C"] | None,
    kept_head: Float[Tensor, "C Dt"] | None = None,
    judged: Bool[Tensor, " N"] | None = None,
    chunk_rows: int | None = None,
) -> DepthScores:
    """Score K depths of predictions of the same N tokens, some tokens at a time.

    Args:
        objective: see named.py.
        hidden: inputs of the draft head: what depth k knows when it predicts token n. Not read
            where the weight is 0.
        heads: draft head matrices, one for all depths or one a depth.
        target_final: the target's final hidden state that judges each token.
        target_head: final states to target logits; not differentiated.
        labels: data token (target id) to predict.
        weights: weight of every loss in `total`, 0 or more; 0 where there is no prediction, which
            costs nothing then.
        vocab_ids: target ids of the draft vocabulary, ascending; None when it is whole.
        kept_head: rows of the target's head for the draft vocabulary, where its logits are nothing
            but this product; None computes all of the target's logits.
        judged: with `kept_head`, tokens whose predictions are compared with the whole target law
            (hit, overlap); None judges all.
        chunk_rows: tokens at a time; None takes what keeps memory near 80 MB on a CPU,
            or 32 tokens where that is more.
    """
    if kept_head is None or vocab_ids is None:
        kept_head = judged = None
    if chunk_rows is None:
        reads = vocab_ids if kept_head is None else None  # whose logits are alive
        chunk_rows = _fitting_rows(heads[0].shape[0], reads, hidden.device.type)
    made = weights > 0
    counts = made if judged is None else made & judged
    chunks = cut_into_pieces(made, judged=judged, chunk_rows=chunk_rows, num_heads=len(heads))
    needed, wide = counts.any(0), _wide(hidden)
    plan = _Plan(target_final, target_head, labels, vocab_ids, kept_head, needed, chunks, wide)
    total, sums = _ChunkedLoss.apply(
        plan, objective, weights, torch.is_grad_enabled(), hidden, *heads
    )
    return DepthScores(total, sums[0], sums[1], sums[2], counts.sum(-1).to(sums.dtype))


@torch.no_grad()
def chunked_losses(
    objective: Objective,
    hidden: Float[Tensor, "K N D"],
    heads: Sequence[Float[Tensor, "C D"]],
    *,
    target_final: Float[Tensor, "N Dt"],
    target_head: Callable[[Float[Tensor, "M Dt"]], Float[Tensor, "M V"]],
    labels: Int[Tensor, " N"],
    vocab_ids: Int[Tensor, " C"] | None,
    kept_head: Float[Tensor, "C Dt"] | None = None,
    chunk_rows: int | None = None,
) -> Float[Tensor, "K N"]:
    """Compute the loss of every single prediction, without gradients: for choosing among them.

    Args:
        objective: see named.py.
        hidden: see `chunked_scores`, as all that follow.
        heads: one for all depths or one a depth.
        target_final: judges each token.
        target_head: final states to target logits.
        labels: data token (target id) to predict; where q has none for it the loss is 0.
        vocab_ids: target ids of the draft vocabulary; None when it is whole.
        kept_head: rows of the target's head for the draft vocabulary.
        chunk_rows: tokens at a time.
    """
    if kept_head is None or vocab_ids is None:
        kept_head = None
    if chunk_rows is None:
        reads = vocab_ids if kept_head is None else None  # whose logits are alive
        chunk_rows = _fitting_rows(heads[0].shape[0], reads, hidden.device.type)
    none = torch.zeros_like(labels, dtype=torch.bool)
    every = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    chunks = cut_into_pieces(every, judged=none, chunk_rows=chunk_rows, num_heads=len(heads))
    wide, work = _wide(hidden), _work_dtype(hidden)
    plan = _Plan(target_final, target_head, labels, vocab_ids, kept_head, none, chunks, wide)
    losses = hidden.new_zeros(hidden.shape[:2], dtype=wide)
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk, teacher in plan.teachers(work):
            for piece in chunk.pieces:
                places = piece.depths, piece.tokens
                draft = _times_head(hidden[places].to(work), heads[piece.head], wide)
                losses[places] = compute_losses(
                    objective,
                    teacher.log_probs[piece.rows],
                    teacher.labels[piece.rows],
                    draft.log_softmax(-1),
                )
    return losses


@torch.no_grad()
def chunked_label_probs(
    hidden: Float[Tensor, "K N D"],
    heads: Sequence[Float[Tensor, "C D"]],
    *,
    labels: Int[Tensor, " N"],
    vocab_ids: Int[Tensor, " C"] | None,
    made: Bool[Tensor, "K N"] | None = None,
    chunk_rows: int | None = None,
) -> Float[Tensor, "K N"]:
    """Compute q of the data token at every prediction, without gradients; 0 where q has none.

    Args:
        hidden: see `chunked_scores`, as all that follow.
        heads: one for all depths or one a depth.
        labels: data token (target id) to predict.
        vocab_ids: target ids of the draft vocabulary; None when it is whole.
        made: True where there is such a prediction; the others cost nothing and give 0. None is
            everywhere.
        chunk_rows: tokens at a time.
    """
    columns = labels if vocab_ids is None else columns_of(labels, vocab_ids)
    rows = chunk_rows or 4 * _fitting_rows(heads[0].shape[0], None, hidden.device.type)
    if made is None:
        made = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    wide, work = _wide(hidden), _work_dtype(hidden)
    probs = hidden.new_zeros(hidden.shape[:2], dtype=wide)
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in cut_into_pieces(made, judged=None, chunk_rows=rows, num_heads=len(heads)):
            for piece in chunk.pieces:
                places, wanted = (piece.depths, piece.tokens), columns[piece.tokens]
                draft = _times_head(hidden[places].to(work), heads[piece.head], wide)
                log_q = -cross_entropy(draft.log_softmax(-1), wanted)
                probs[places] = log_q.exp().masked_fill(wanted < 0, 0.0)
    return probs


def _fitting_rows(width: int, vocab_ids: Tensor | None, device: str) -> int:
    """Choose a chunk: a row holds about 2 numbers a target token and 10 a draft token."""
    vocab_size = width if vocab_ids is None else int(vocab_ids[-1]) + 1
    alive = _ALIVE_ON_CPU if device == "cpu" else _ALIVE_ELSEWHERE
    return max(alive // (2 * vocab_size + 10 * width), _LEAST_ROWS)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _work_dtype(hidden: Tensor) -> torch.dtype:
    """Choose what the heads multiply in: autocast's dtype where that is on."""
    device = hidden.device.type
    work = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return torch.float32 if work == torch.float16 else work  # gradients of logits underflow


@dataclass(frozen=True, slots=True)
class _Plan:
    """The target's side of every chunk; `judged` are the tokens that need its whole law."""

    target_final: Tensor
    target_head: Callable[[Tensor], Tensor]
    labels: Tensor
    vocab_ids: Tensor | None
    kept_head: Tensor | None
    judged: Tensor
    chunks: list[Chunk]
    wide: torch.dtype

    def teachers(self, work: torch.dtype) -> Iterator[tuple[Chunk, Teacher]]:
        """Give the target's law chunk by chunk; `top` and `log_mass` are for judged rows only."""
        if self.kept_head is None or self.vocab_ids is None:
            for chunk in self.chunks:
                logits = self.target_head(self.target_final[chunk.tokens])
                yield chunk, read_teacher(logits, self.labels[chunk.tokens], self.vocab_ids)
            return
        top, log_norm = self._judge()
        labels = columns_of(self.labels, self.vocab_ids)
        for chunk in self.chunks:
            part = chunk.tokens
            kept = _times_head(self.target_final[part].to(work), self.kept_head, self.wide)
            log_mass = kept.logsumexp(-1, keepdim=True)
            yield (
                chunk,
                Teacher(
                    log_probs=(kept - log_mass).clamp_min(LOG_OF_NOTHING),
                    log_mass=log_mass - log_norm[part].unsqueeze(1),
                    top=top[part],
                    labels=labels[part],
                ),
            )

    def _judge(self) -> tuple[Tensor, Tensor]:
        """Run the whole head over judged rows: column of the argmax, log of the normaliser."""
        assert self.vocab_ids is not None
        top = torch.full_like(self.labels, -1)
        log_norm = torch.zeros_like(self.labels, dtype=self.wide)
        for part in self.judged.nonzero().squeeze(1).split(_JUDGED_AT_ONCE):
            logits = self.target_head(self.target_final[part]).to(self.wide)
            top[part] = columns_of(logits.argmax(-1), self.vocab_ids)
            log_norm[part] = logits.logsumexp(-1)
        return top, log_norm


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is ready when the loss is; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        objective: Objective,
        weights: Tensor,
        wants_grad: bool,
        hidden: Tensor,
        *heads: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run both heads over every chunk, and their gradients when wanted."""
        work = _work_dtype(hidden)
        wide = plan.wide
        needs = [wants_grad and needed for needed in ctx.needs_input_grad[4:]]
        needs_any = any(needs)
        hidden_grad = torch.zeros_like(hidden) if needs[0] else None
        head_grads = [
            torch.zeros_like(head, dtype=wide) if need else None
            for head, need in zip(heads, needs[1:], strict=True)
        ]
        total = torch.zeros((), dtype=wide, device=hidden.device)
        sums = torch.zeros(3, hidden.shape[0], dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk, teacher in plan.teachers(work):
                for piece in chunk.pieces:
                    places, head = (piece.depths, piece.tokens), heads[piece.head]
                    rows, log_p = hidden[places].to(work), teacher.log_probs[piece.rows]
                    draft = _times_head(rows, head, wide).requires_grad_(needs_any)
                    with torch.set_grad_enabled(needs_any):
                        log_q = draft.log_softmax(-1)
                        losses = compute_losses(objective, log_p, teacher.labels[piece.rows], log_q)
                        loss = (losses * weights[places]).sum()
                    total += loss.detach()
                    figures = _figures(piece, teacher, log_p, log_q.detach(), losses.detach())
                    for depth, span in piece.spans:
                        sums[:, depth] += figures[:, span].sum(1)
                    if not needs_any:
                        continue
                    grad = torch.autograd.grad(loss, draft)[0]
                    if hidden_grad is not None:
                        hidden_grad[places] = _back_to_rows(grad, head, work).to(hidden.dtype)
                    if (head_grad := head_grads[piece.head]) is not None:
                        _add_to_head(head_grad, grad, rows)
        ctx.gradients = [
            hidden_grad,
            *(g if g is None else g.to(h.dtype) for g, h in zip(head_grads, heads, strict=True)),
        ]
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that forward computed, in place: a copy of a head's is large."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a chunked loss are there once; compute it again")
        return (None,) * 4 + tuple(g if g is None else g.mul_(grads[0]) for g in gradients)


def _figures(
    piece: Piece, teacher: Teacher, log_p: Tensor, log_q: Tensor, losses: Tensor
) -> Tensor:
    """Give loss, hit and overlap of every judged prediction of a piece."""
    log_q = log_q[piece.judged]
    hits = log_q.argmax(-1) == teacher.top[piece.rows][piece.judged]
    whole = log_p[piece.judged] + teacher.log_mass[piece.rows][piece.judged]
    return torch.stack([losses[piece.judged], hits.to(losses.dtype), overlap(whole, log_q)])


def _slices(head: Tensor, work: torch.dtype) -> Iterator[slice]:
    """Cut a head so that a cast of each piece is small; whole where there is nothing to cast."""
    size = head.shape[0]
    step = size if head.dtype == work else max(_CAST_AT_ONCE // head.shape[1], 1)
    for start in range(0, size, step):
        yield slice(start, start + step)


def _times_head(rows: Tensor, head: Tensor, wide: torch.dtype) -> Tensor:
    """Compute rows @ head.T in the dtype of the rows; give it in a wide one."""
    parts = [(rows @ head[cut].to(rows.dtype).T).to(wide) for cut in _slices(head, rows.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _back_to_rows(grad: Tensor, head: Tensor, work: torch.dtype) -> Tensor:
    """Compute grad @ head, added up in the gradient's own wide dtype."""
    parts = (grad[:, cut].to(work) @ head[cut].to(work) for cut in _slices(head, work))
    total = next(parts).to(grad.dtype)
    for part in parts:
        total += part
    return total


def _add_to_head(head_grad: Tensor, grad: Tensor, rows: Tensor) -> None:
    """Add grad.T @ rows to a gradient kept in a wide dtype."""
    if rows.dtype == head_grad.dtype:
        head_grad.addmm_(grad.T, rows)
        return
    for cut in _slices(head_grad, rows.dtype):
        head_grad[cut] += grad[:, cut].to(rows.dtype).T @ rows
