import math

import pytest
import torch

from draftlab.objectives.acceptance import lk_hybrid, neg_log_acceptance, overlap, tv
from draftlab.objectives.distillation import forward_kl

P = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
Q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()


def test_overlap_is_the_chance_that_a_draw_is_kept():
    assert overlap(P, Q).item() == pytest.approx(0.5 + 0.2 + 0.1)


def test_tv_and_its_negative_log_follow_from_the_overlap():
    assert tv(P, Q).item() == pytest.approx(0.2)
    assert neg_log_acceptance(P, Q).item() == pytest.approx(-math.log(0.8))


def test_lk_hybrid_leans_on_kl_far_away_and_on_tv_nearby():
    weight = math.exp(-3 * 0.8)
    expected = weight * forward_kl(P, Q).item() + (1 - weight) * 0.2
    assert lk_hybrid(P, Q).item() == pytest.approx(expected)


def test_lk_hybrid_does_not_differentiate_its_weight():
    logits = Q.clone().requires_grad_()
    lk_hybrid(P, logits.log_softmax(-1)).sum().backward()
    other = Q.clone().requires_grad_()
    weight = math.exp(-3 * 0.8)
    log_q = other.log_softmax(-1)
    (weight * forward_kl(P, log_q) + (1 - weight) * tv(P, log_q)).sum().backward()
    assert torch.allclose(logits.grad, other.grad)
