import pytest
import torch
from torch import nn

from draftlab.training.averaging import WeightAverage


def test_the_mean_follows_the_weights_at_its_decay():
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    average = WeightAverage({"w": weight}, decay=0.9)
    with torch.no_grad():
        weight.copy_(torch.tensor([3.0, 1.0]))
    average.update(100)
    assert torch.allclose(average.means["w"], torch.tensor([1.2, -0.8]))


@pytest.mark.parametrize(
    ("step", "decay"), [(1, 2 / 11), (2, 3 / 12), (8990, 0.999), (20_000, 0.999)]
)
def test_the_decay_warms_up(step, decay):
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    average = WeightAverage({"w": weight}, decay=0.999)
    with torch.no_grad():
        weight.fill_(1.0)
    average.update(step)
    assert average.means["w"].item() == pytest.approx(1 - decay)


def test_a_mean_over_few_steps_leaves_the_start_behind():
    weight = nn.Parameter(torch.zeros(1))
    average = WeightAverage({"w": weight}, decay=0.999)
    with torch.no_grad():
        for step in range(1, 201):
            weight.fill_(step / 200)
            average.update(step)
    assert average.means["w"].item() > 0.85


def test_the_weights_come_back_as_they_were():
    weight = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    average = WeightAverage({"w": weight}, decay=0.5)
    with torch.no_grad():
        weight.add_(1.0)
    before = weight.detach().clone()
    with average.in_place():
        assert torch.equal(weight, average.means["w"])
    assert torch.equal(weight, before)
