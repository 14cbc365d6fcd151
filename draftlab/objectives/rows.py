"""From two rows of logits to loss, hit and overlap, also over a reduced draft vocabulary.

In: target logits over V tokens, draft logits over Vd of them. Out: `RowScores`.
Read first: read_teacher, then score_rows, the plain form and the oracle of chunked.py.

Rules of a reduced vocabulary (Vd < V), written here and nowhere else:
- the law to learn is p restricted to the draft vocabulary and renormalised (EAGLE-3, section 3);
- a row whose data token lies outside the draft vocabulary has loss 0: there is nothing the draft
  could say right. It still counts as a prediction, in every mean;
- hit and overlap know nothing of the restriction: argmax and p are over the whole target
  vocabulary, so a target choice outside the draft vocabulary is a miss (case O-26).
"""

from dataclasses import dataclass

import torch

from draftlab.objectives.acceptance import overlap
from draftlab.objectives.named import Objective
from draftlab.shapes import Bool, Float, Int, Tensor

# a token the target forbids outright (logit -inf) keeps a finite log: 0 * log 0 must be 0, not NaN
LOG_OF_NOTHING = -1e4


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says at N rows, in columns of the draft vocabulary.

    Attributes:
        log_probs: p restricted to the draft vocabulary and renormalised.
        log_mass: log of what p gives to the draft vocabulary; 0 when it is whole.
        top: column of the argmax over the whole target vocabulary, -1 when the draft has none.
        labels: column of the data token, -1 when the draft has none.
    """

    log_probs: Float[Tensor, "N C"]
    log_mass: Float[Tensor, "N 1"]
    top: Int[Tensor, " N"]
    labels: Int[Tensor, " N"]


@dataclass(frozen=True, slots=True)
class RowScores:
    """How well a draft law did, row by row.

    Attributes:
        loss: to descend; 0 where the draft vocabulary cannot say the answer.
        hit: True where the draft's argmax is the target's, over the whole target vocabulary.
        overlap: sum_v min(p, q) over the whole target vocabulary.
    """

    loss: Float[Tensor, " N"]
    hit: Bool[Tensor, " N"]
    overlap: Float[Tensor, " N"]


def read_teacher(
    target_logits: Float[Tensor, "N V"],
    labels: Int[Tensor, " N"],
    vocab_ids: Int[Tensor, " C"] | None,
) -> Teacher:
    """Reduce target logits to what comparing with a draft law needs.

    Args:
        target_logits: any float dtype; computed in float32 or wider.
        labels: data token (target id) each row should predict.
        vocab_ids: target ids of the draft vocabulary, ascending; None when it is whole.
    """
    logits = target_logits.detach().to(torch.promote_types(target_logits.dtype, torch.float32))
    top = logits.argmax(-1)
    # log_softmax is one fast kernel on CPU; logsumexp over V costs three times as much
    whole = logits.log_softmax(-1)
    if vocab_ids is None:
        log_probs = whole.clamp_min_(LOG_OF_NOTHING)
        return Teacher(log_probs, whole.new_zeros(whole.shape[0], 1), top, labels)
    kept = whole.index_select(-1, vocab_ids).clamp_min_(LOG_OF_NOTHING)
    log_mass = kept.logsumexp(-1, keepdim=True)
    return Teacher(
        log_probs=kept - log_mass,
        log_mass=log_mass,
        top=columns_of(top, vocab_ids),
        labels=columns_of(labels, vocab_ids),
    )


def compare_rows(
    objective: Objective, teacher: Teacher, draft_logits: Float[Tensor, "N C"]
) -> RowScores:
    """Score draft logits against a teacher; `loss` is differentiable in the draft logits."""
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    log_q = draft_logits.to(wide).log_softmax(-1)
    loss = compute_losses(objective, teacher.log_probs, teacher.labels, log_q)
    with torch.no_grad():
        kept = overlap(teacher.log_probs + teacher.log_mass, log_q)
        hit = draft_logits.argmax(-1) == teacher.top
    return RowScores(loss, hit, kept)


def compute_losses(
    objective: Objective,
    log_probs: Float[Tensor, "N C"],
    labels: Int[Tensor, " N"],
    log_q: Float[Tensor, "N C"],
) -> Float[Tensor, " N"]:
    """Compute the loss of every row; 0 where the draft cannot say the data token.

    Args:
        objective: see named.py.
        log_probs: what to learn, over the draft vocabulary.
        labels: column of the data token, -1 outside.
        log_q: the draft's log law.
    """
    return objective.compare(log_probs, log_q, labels).masked_fill(labels < 0, 0.0)


def score_rows(
    objective: Objective,
    target_logits: Float[Tensor, "N V"],
    draft_logits: Float[Tensor, "N C"],
    labels: Int[Tensor, " N"],
    vocab_ids: Int[Tensor, " C"] | None = None,
) -> RowScores:
    """Compare draft logits with target logits, row by row: the plain form, nothing chunked.

    Args:
        objective: see named.py.
        target_logits: logits that judge each row, over the whole target vocabulary.
        draft_logits: over the draft vocabulary.
        labels: data token (target id) each row predicts.
        vocab_ids: target ids of the draft vocabulary, ascending; None when it is whole.
    """
    return compare_rows(objective, read_teacher(target_logits, labels, vocab_ids), draft_logits)


def columns_of(ids: Int[Tensor, " N"], vocab_ids: Int[Tensor, " C"]) -> Int[Tensor, " N"]:
    """Find target ids among the ascending ids of a draft vocabulary; -1 where it lacks them."""
    index = torch.searchsorted(vocab_ids, ids).clamp_max(vocab_ids.shape[0] - 1)
    return torch.where(vocab_ids[index] == ids, index, -1)
