import torch
from torch import nn

from draftlab.training.averaging import WeightAverage


def test_the_mean_follows_the_weights_at_its_decay():
    weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    average = WeightAverage({"w": weight}, decay=0.9)
    with torch.no_grad():
        weight.copy_(torch.tensor([3.0, 1.0]))
    average.update()
    assert torch.allclose(average.means["w"], torch.tensor([1.2, -0.8]))


def test_the_weights_come_back_as_they_were():
    weight = nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    average = WeightAverage({"w": weight}, decay=0.5)
    with torch.no_grad():
        weight.add_(1.0)
    before = weight.detach().clone()
    with average.in_place():
        assert torch.equal(weight, average.means["w"])
    assert torch.equal(weight, before)
