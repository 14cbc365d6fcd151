import math

import pytest
import torch

from draftlab.objectives.distillation import forward_kl, jsd, reverse_kl, top_k


def law(*probs):
    return torch.tensor([probs], dtype=torch.float64).log()


P, Q = (0.7, 0.2, 0.1), (0.5, 0.25, 0.25)


def test_forward_kl_weighs_by_the_target():
    expected = sum(p * math.log(p / q) for p, q in zip(P, Q, strict=True))
    assert forward_kl(law(*P), law(*Q)).item() == pytest.approx(expected)


def test_reverse_kl_weighs_by_the_draft():
    expected = sum(q * math.log(q / p) for p, q in zip(P, Q, strict=True))
    assert reverse_kl(law(*P), law(*Q)).item() == pytest.approx(expected)


def test_jsd_is_symmetric_and_log_two_for_laws_that_never_meet():
    assert jsd(law(*P), law(*Q)).item() == pytest.approx(jsd(law(*Q), law(*P)).item())
    m = [(p + q) / 2 for p, q in zip(P, Q, strict=True)]
    expected = 0.5 * forward_kl(law(*P), law(*m)) + 0.5 * forward_kl(law(*Q), law(*m))
    assert jsd(law(*P), law(*Q)).item() == pytest.approx(expected.item())
    apart = jsd(law(1 - 1e-12, 1e-12), law(1e-12, 1 - 1e-12))
    assert apart.item() == pytest.approx(math.log(2))


def test_top_k_is_the_cross_entropy_over_the_targets_ten_likeliest_tokens():
    p = torch.arange(1, 13, dtype=torch.float64).log_softmax(0).unsqueeze(0)
    q = torch.zeros(1, 12, dtype=torch.float64).log_softmax(-1)
    expected = p[0, 2:].exp().sum() * math.log(12)
    assert top_k(p, q).item() == pytest.approx(expected.item())
    assert top_k(law(*P), law(*Q)).item() == pytest.approx(
        -sum(p * math.log(q) for p, q in zip(P, Q, strict=True))
    )
