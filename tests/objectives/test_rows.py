import pytest
import torch

from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows

V = 12
IDS = torch.tensor([0, 3, 4, 9])


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(40, V, generator=generator, dtype=torch.float64)
    draft = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return target, draft


def test_the_law_to_learn_is_restricted_and_renormalised(logits):
    target, draft = logits
    p = target[:, IDS].softmax(-1)
    q = draft.softmax(-1)
    expected = (p * (p / q).log()).sum(-1)
    labels = torch.arange(40) % V
    inside = (labels.unsqueeze(1) == IDS).any(1)
    loss = score_rows(objective("forward_kl"), target, draft, labels, IDS).loss
    assert 5 < inside.sum() < 35
    assert torch.allclose(loss[inside], expected[inside])
    assert (loss[~inside] == 0).all()


def test_hit_and_overlap_are_over_the_whole_target_vocabulary(logits):
    target, draft = logits
    wide = torch.zeros(40, V, dtype=torch.float64)
    wide[:, IDS] = draft.softmax(-1)
    scores = score_rows(objective("forward_kl"), target, draft, torch.zeros(40).long(), IDS)
    assert torch.allclose(scores.overlap, torch.minimum(wide, target.softmax(-1)).sum(-1))
    assert (scores.hit == (wide.argmax(-1) == target.argmax(-1))).all()


def test_a_head_right_on_every_covered_token_scores_the_coverage_not_one():
    """Case O-26: a third of the target's choices lie outside the draft vocabulary."""
    choices = torch.tensor([0, 3, 4, 9, 1, 2] * 5)
    target = 5.0 * torch.nn.functional.one_hot(choices, V).double()
    scores = score_rows(objective("forward_kl"), target, target[:, IDS], choices, IDS)
    assert scores.hit.double().mean().item() == pytest.approx(4 / 6)


def test_cross_entropy_skips_data_tokens_outside_and_no_others(logits):
    target, draft = logits
    labels = torch.arange(40) % V
    loss = score_rows(objective("cross_entropy"), target, draft, labels, IDS).loss
    inside = (labels.unsqueeze(1) == IDS).any(1)
    assert (loss[~inside] == 0).all()
    columns = torch.tensor([IDS.tolist().index(i) for i in labels[inside].tolist()])
    assert torch.allclose(
        loss[inside], -draft.log_softmax(-1)[inside].gather(1, columns[:, None])[:, 0]
    )


def test_a_whole_vocabulary_equals_the_reduced_one_with_every_id(logits):
    target, _ = logits
    draft, labels = target.flip(0), torch.arange(40) % V
    for name in ("forward_kl", "cross_entropy", "tv"):
        whole = score_rows(objective(name), target, draft, labels)
        listed = score_rows(objective(name), target, draft, labels, torch.arange(V))
        assert torch.allclose(whole.loss, listed.loss)
        assert torch.allclose(whole.overlap, listed.overlap)
        assert (whole.hit == listed.hit).all()


def test_tokens_the_target_forbids_give_finite_numbers():
    target = torch.tensor([[0.0, 1.0, -torch.inf]])
    draft = torch.zeros(1, 3, requires_grad=True)
    for name in ("forward_kl", "reverse_kl", "jsd", "lk_hybrid", "neg_log_acceptance"):
        loss = score_rows(objective(name), target, draft, torch.tensor([0])).loss.sum()
        (grad,) = torch.autograd.grad(loss, draft)
        assert torch.isfinite(loss)
        assert torch.isfinite(grad).all()


def test_half_precision_logits_are_compared_in_float32(logits):
    target, draft = (x.bfloat16() for x in logits)
    scores = score_rows(objective("forward_kl"), target, draft, torch.zeros(40).long(), IDS)
    exact = score_rows(
        objective("forward_kl"), target.double(), draft.double(), torch.zeros(40).long(), IDS
    )
    assert scores.loss.dtype == torch.float32
    assert torch.allclose(scores.loss.double(), exact.loss, atol=1e-5)
