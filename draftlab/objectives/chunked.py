"""Loss of many predictions without ever holding their logits: both heads run chunk by chunk.

In: hidden states before both heads. Out: a total to call backward on, and sums per depth.
Full-vocabulary float32 logits of every depth are what runs out of memory first (case O-25), so
the gradient of a chunk is taken while its logits are alive, and only gradients of hidden states and
head weights are kept. The target's head runs once a row, whatever the number of depths; with a
reduced draft vocabulary only its kept rows do, and the whole head judges a part of the rows: it
would cost more than all else together, and only for the figures.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftlab.objectives.acceptance import overlap
from draftlab.objectives.named import Objective
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
_JUDGED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class DepthScores:
    """Sums over N predictions at each of K depths; all but `total` over the judged ones.

    Attributes:
        total: sum of weighted losses of all predictions; the only one with a gradient.
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
        hidden: inputs of the draft head: what depth k knows when it predicts token n. Anything
            finite where depth k has no such prediction.
        heads: draft head matrices, one for all depths or one a depth.
        target_final: the target's final hidden state that judges each token.
        target_head: final states to target logits; not differentiated.
        labels: data token (target id) to predict.
        weights: weight of every loss in `total`; 0 where there is no prediction.
        vocab_ids: target ids of the draft vocabulary, ascending; None when it is whole.
        kept_head: rows of the target's head for the draft vocabulary, where its logits are nothing
            but this product; None computes all of the target's logits.
        judged: with `kept_head`, tokens whose predictions are compared with the whole target law
            (hit, overlap); None judges all.
        chunk_rows: tokens at a time; None takes what keeps memory near 80 MB on a CPU.
    """
    if kept_head is None or vocab_ids is None:
        kept_head = judged = None
    if judged is None:
        judged = torch.ones_like(labels, dtype=torch.bool)
    if chunk_rows is None:
        chunk_rows = _fitting_rows(
            heads[0].shape[0], vocab_ids if kept_head is None else None, hidden.device.type
        )
    plan = _Plan(
        objective,
        target_final,
        target_head,
        labels,
        weights,
        vocab_ids,
        kept_head,
        judged,
        chunk_rows,
    )
    total, sums = _ChunkedLoss.apply(plan, torch.is_grad_enabled(), hidden, *heads)
    count = ((weights > 0) & judged).sum(-1).to(sums.dtype)
    return DepthScores(total, sums[0], sums[1], sums[2], count)


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
    kept_head: Tensor | None
    judged: Tensor
    chunk_rows: int

    def teachers(self, work: torch.dtype) -> Iterator[tuple[slice, Teacher]]:
        """Give the target's law chunk by chunk; `top` and `log_mass` are for judged rows only."""
        if self.kept_head is None or self.vocab_ids is None:
            for part in self._parts():
                logits = self.target_head(self.target_final[part])
                yield part, read_teacher(logits, self.labels[part], self.vocab_ids)
            return
        top, log_norm = self._judge()
        head = self.kept_head.to(work)
        labels = columns_of(self.labels, self.vocab_ids)
        for part in self._parts():
            kept = (self.target_final[part].to(work) @ head.T).to(log_norm.dtype)
            log_mass = kept.logsumexp(-1, keepdim=True)
            yield (
                part,
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
        wide = torch.promote_types(self.weights.dtype, torch.float32)
        top = torch.full_like(self.labels, -1)
        log_norm = self.weights.new_zeros(self.labels.shape, dtype=wide)
        rows = self.judged.nonzero().squeeze(1)
        for part in rows.split(_JUDGED_AT_ONCE):
            logits = self.target_head(self.target_final[part]).to(wide)
            top[part] = columns_of(logits.argmax(-1), self.vocab_ids)
            log_norm[part] = logits.logsumexp(-1)
        return top, log_norm

    def _parts(self) -> Iterator[slice]:
        for start in range(0, self.labels.shape[0], self.chunk_rows):
            yield slice(start, start + self.chunk_rows)


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
    depths = hidden.shape[0]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    needs = [wants_grad and needed for needed in ctx.needs_input_grad[2:]]
    gradients = [
        torch.zeros_like(x) if need else None
        for x, need in zip((hidden, *heads), needs, strict=True)
    ]
    matrices = [head.to(work) for head in heads]
    total = torch.zeros((), dtype=wide, device=hidden.device)
    sums = torch.zeros(3, depths, dtype=wide, device=hidden.device)
    for part, teacher in plan.teachers(work):
        chosen = plan.judged[part]
        for depth in range(depths):
            which = depth if len(heads) > 1 else 0
            rows = hidden[depth, part].to(work)
            weight = plan.weights[depth, part]
            draft = (rows @ matrices[which].T).to(wide).requires_grad_(any(needs))
            with torch.set_grad_enabled(any(needs)):
                log_q = draft.log_softmax(-1)
                losses = compute_losses(plan.objective, teacher.log_probs, teacher.labels, log_q)
                loss = (losses * weight).sum()
            total += loss.detach()
            counts = (weight[chosen] > 0).to(wide)
            law = log_q.detach()[chosen]
            hits = law.argmax(-1) == teacher.top[chosen]
            kept = overlap((teacher.log_probs + teacher.log_mass)[chosen], law)
            sums[0, depth] += (losses.detach()[chosen] * counts).sum()
            sums[1, depth] += (hits * counts).sum()
            sums[2, depth] += (kept * counts).sum()
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
