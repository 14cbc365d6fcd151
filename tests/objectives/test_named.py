import pytest
import torch

from draftlab.errors import ConfigError
from draftlab.objectives.named import OBJECTIVES, objective


def laws(seed=0, rows=4, width=7):
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return p.log_softmax(-1), q.log_softmax(-1), torch.arange(rows) % width


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"objective='kl'.*forward_kl.*lk_hybrid"):
        objective("kl")


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n not in ("cross_entropy", "top_k")])
def test_every_distance_is_zero_only_where_the_laws_are_equal(name):
    p, q, labels = laws()
    compare = objective(name).compare
    assert compare(p, p, labels).abs().max() < 1e-12
    assert compare(p, q, labels).min() > 1e-3


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_descending_an_objective_raises_acceptance(name):
    torch.manual_seed(0)
    p = (3 * torch.randn(1, 6, dtype=torch.float64)).log_softmax(-1)
    logits = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    chosen = objective(name)

    def kept():
        return torch.minimum(p, logits.log_softmax(-1)).exp().sum().item()

    before = kept()
    for _ in range(100):
        loss = chosen.compare(p, logits.log_softmax(-1), p.argmax(-1)).sum()
        (grad,) = torch.autograd.grad(loss, logits)
        logits.data -= 0.2 * grad
    assert kept() > before + 0.1


@pytest.mark.parametrize("name", [n for n in OBJECTIVES if n != "lk_hybrid"])
def test_every_gradient_is_that_of_finite_differences(name):
    """lk_hybrid is left out: its weight is held fixed, which finite differences do not do."""
    p, q, labels = laws(seed=2)
    logits = q.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: objective(name).compare(p, x.log_softmax(-1), labels), (logits,)
    )


def test_a_sum_is_the_sum_of_its_weighted_parts():
    p, q, labels = laws(seed=1)
    parts = {name: objective(name).compare(p, q, labels) for name in ("cross_entropy", "tv")}
    mixed = objective("0.1*cross_entropy + 0.9*tv").compare(p, q, labels)
    assert torch.allclose(mixed, 0.1 * parts["cross_entropy"] + 0.9 * parts["tv"])


@pytest.mark.parametrize("weight", ["-1", "x", "nan", "0"])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ConfigError, match=f"weight '{weight}' of tv is no positive number"):
        objective(f"{weight}*tv+cross_entropy")


def test_the_part_of_a_sum_that_is_no_objective_is_named():
    with pytest.raises(ConfigError, match=r"'cross_entropy\+tvv': 'tvv' is no objective; expected"):
        objective("cross_entropy+tvv")


def test_a_part_named_twice_is_refused():
    with pytest.raises(ConfigError, match="named twice"):
        objective("tv+0.5*tv")
