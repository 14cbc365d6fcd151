"""Loss of many predictions without ever holding their logits: both heads run chunk by chunk.

In: hidden states before both heads. Out: a total to call backward on, and sums per depth.
Full-vocabulary float32 logits of every depth are what runs out of memory first (case O-25), so
the gradient of a chunk is taken while its logits are alive, and only gradients of hidden states and
head weights are kept. The target's head runs once a row, whatever the number of depths.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftlab.objectives.named import Objective
from draftlab.objectives.rows import compare_rows, read_teacher
from draftlab.shapes import Float, Int, Tensor

# numbers alive at once in a chunk; on a CPU larger chunks are no faster: glibc stops reusing pages
_ALIVE_ON_CPU = 20_000_000
_ALIVE_ELSEWHERE = 160_000_000


@dataclass(frozen=True, slots=True)
class DepthScores:
    """Sums over N predictions at each of K depths.

    Attributes:
        total: sum of weighted losses; the only one with a gradient.
        loss_sum: unweighted losses of predictions that count.
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
    heads: Sequence[Tensor],
    *,
    target_final: Float[Tensor, "N Dt"],
    target_head: Callable[[Tensor], Tensor],
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, "K N"],
    vocab_ids: Int[Tensor, " C"] | None,
    chunk_rows: int | None = None,
) -> DepthScores:
    """Score K depths of predictions of the same N tokens, some tokens at a time.

    Args:
        objective: see named.py.
        hidden: inputs of the draft head: what depth k knows when it predicts token n. Anything
            finite where depth k has no such prediction.
        heads: draft head matrices [C D], one for all depths or one a depth.
        target_final: the target's final hidden state that judges each token.
        target_head: final states to target logits [N V]; not differentiated.
        labels: data token (target id) to predict.
        weights: weight of every loss in `total`; 0 where there is no prediction.
        vocab_ids: target ids of the draft vocabulary, ascending; None when it is whole.
        chunk_rows: tokens at a time; None takes what keeps memory near 80 MB on a CPU.
    """
    if chunk_rows is None:
        chunk_rows = _fitting_rows(heads[0].shape[0], vocab_ids, hidden.device.type)
    plan = _Plan(objective, target_final, target_head, labels, weights, vocab_ids, chunk_rows)
    total, sums = _ChunkedLoss.apply(plan, torch.is_grad_enabled(), hidden, *heads)
    return DepthScores(total, sums[0], sums[1], sums[2], (weights > 0).sum(-1).to(sums.dtype))


def _fitting_rows(width: int, vocab_ids: Tensor | None, device: str) -> int:
    """Choose a chunk: a row holds about 2 numbers a target token and 10 a draft token."""
    vocab_size = width if vocab_ids is None else int(vocab_ids[-1]) + 1
    alive = _ALIVE_ON_CPU if device == "cpu" else _ALIVE_ELSEWHERE
    return max(alive // (2 * vocab_size + 10 * width), 16)


@dataclass(frozen=True, slots=True)
class _Plan:
    objective: Objective
    target_final: Tensor
    target_head: Callable[[Tensor], Tensor]
    labels: Tensor
    weights: Tensor
    vocab_ids: Tensor | None
    chunk_rows: int


class _ChunkedLoss(torch.autograd.Function):
    """The gradient is ready when the loss is; backward only scales it."""

    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, wants_grad: bool, hidden: Tensor, *heads: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run both heads over every chunk, and their gradients when wanted."""
        device = hidden.device.type
        work = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        )
        work = torch.float32 if work == torch.float16 else work  # gradients of logits underflow
        with torch.autocast(device, enabled=False):
            return _run_chunks(ctx, plan, wants_grad, hidden, heads, work)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that forward computed."""
        return (None, None, *(None if g is None else g * grads[0] for g in ctx.gradients))


def _run_chunks(
    ctx: Any,
    plan: _Plan,
    wants_grad: bool,
    hidden: Tensor,
    heads: tuple[Tensor, ...],
    work: torch.dtype,
) -> tuple[Tensor, Tensor]:
    depths, num_rows, _ = hidden.shape
    wide = torch.promote_types(hidden.dtype, torch.float32)
    needs = [wants_grad and needed for needed in ctx.needs_input_grad[2:]]
    gradients = [
        torch.zeros_like(x) if need else None
        for x, need in zip((hidden, *heads), needs, strict=True)
    ]
    matrices = [head.to(work) for head in heads]
    total = torch.zeros((), dtype=wide, device=hidden.device)
    sums = torch.zeros(3, depths, dtype=wide, device=hidden.device)
    for start in range(0, num_rows, plan.chunk_rows):
        part = slice(start, start + plan.chunk_rows)
        logits = plan.target_head(plan.target_final[part])
        teacher = read_teacher(logits, plan.labels[part], plan.vocab_ids)
        for depth in range(depths):
            which = depth if len(heads) > 1 else 0
            rows = hidden[depth, part].to(work)
            weight = plan.weights[depth, part]
            draft = (rows @ matrices[which].T).to(wide).requires_grad_(any(needs))
            with torch.set_grad_enabled(any(needs)):
                scores = compare_rows(plan.objective, teacher, draft)
                loss = (scores.loss * weight).sum()
            total += loss.detach()
            counts = (weight > 0).to(wide)
            sums[0, depth] += (scores.loss.detach() * counts).sum()
            sums[1, depth] += (scores.hit * counts).sum()
            sums[2, depth] += (scores.overlap * counts).sum()
            if any(needs):
                grad = torch.autograd.grad(loss, draft)[0].to(work)
                if gradients[0] is not None:
                    gradients[0][depth, part] = grad @ matrices[which]
                matrix_grad = gradients[1 + which]
                if matrix_grad is not None:
                    matrix_grad += grad.T @ rows
    ctx.gradients = gradients
    ctx.mark_non_differentiable(sums)
    return total, sums
