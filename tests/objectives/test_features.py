import pytest
import torch

from draftlab.objectives.features import smooth_l1


def test_small_differences_count_squared_and_large_ones_by_size():
    predicted = torch.tensor([[0.5, 0.0], [3.0, -2.0]])
    losses = smooth_l1(predicted, torch.zeros(2, 2))
    assert losses.tolist() == pytest.approx([0.125 / 2, (2.5 + 1.5) / 2])


def test_half_precision_states_are_compared_in_float32_and_the_true_one_gets_no_gradient():
    true = torch.full((1, 4), 256.0, dtype=torch.bfloat16, requires_grad=True)
    predicted = torch.full((1, 4), 256.5, requires_grad=True)
    loss = smooth_l1(predicted, true)
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.125)
    assert true.grad is None
