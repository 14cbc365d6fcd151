import pytest
import torch

from draftlab.errors import ConfigError
from draftlab.objectives.named import OBJECTIVES, objective


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"objective='kl'.*forward_kl.*lk_hybrid"):
        objective("kl")


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "cross_entropy"])
def test_every_distance_is_zero_only_where_the_laws_are_equal(name):
    torch.manual_seed(0)
    p = torch.randn(4, 7, dtype=torch.float64).log_softmax(-1)
    q = torch.randn(4, 7, dtype=torch.float64).log_softmax(-1)
    compare = objective(name).compare
    assert compare(p, p).abs().max() < 1e-12
    assert compare(p, q).min() > 1e-3


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_descending_an_objective_raises_acceptance(name):
    torch.manual_seed(0)
    p = (3 * torch.randn(1, 6, dtype=torch.float64)).log_softmax(-1)
    logits = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    chosen = objective(name)

    def loss():
        log_q = logits.log_softmax(-1)
        return (
            chosen.compare(log_q, p.argmax(-1)) if chosen.uses_label else chosen.compare(p, log_q)
        ).sum()

    def kept():
        return torch.minimum(p, logits.log_softmax(-1)).exp().sum().item()

    before = kept()
    for _ in range(100):
        (grad,) = torch.autograd.grad(loss(), logits)
        logits.data -= 0.2 * grad
    assert kept() > before + 0.1
