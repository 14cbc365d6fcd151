import math

import pytest
import torch

from draftlab.objectives.cross_entropy import cross_entropy


def test_cross_entropy_is_the_negative_log_of_the_data_token_and_zero_without_one():
    log_q = torch.tensor([[0.7, 0.3], [0.6, 0.4]], dtype=torch.float64).log()
    loss = cross_entropy(log_q, torch.tensor([1, -1]))
    assert loss.tolist() == pytest.approx([-math.log(0.3), 0.0])
