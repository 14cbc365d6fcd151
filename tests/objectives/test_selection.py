import pytest
import torch

from draftlab.errors import ConfigError
from draftlab.objectives.selection import most_learnable

DRAFT = torch.tensor([3.0, 1.0, 2.0, 5.0, 0.5])
REFERENCE = torch.tensor([2.9, 0.1, 1.5, 4.9, 0.5])


def test_tokens_are_chosen_by_how_far_the_draft_is_behind_not_by_their_loss():
    assert most_learnable(DRAFT, REFERENCE, 0.4).tolist() == [False, True, True, False, False]


def test_the_whole_share_keeps_all_and_a_tiny_one_keeps_one():
    assert most_learnable(DRAFT, REFERENCE, 1.0).all()
    assert most_learnable(DRAFT, REFERENCE, 0.01).tolist() == [False, True, False, False, False]


def test_no_tokens_give_no_choice():
    assert most_learnable(DRAFT[:0], REFERENCE[:0], 0.4).shape == (0,)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_a_fraction_that_is_no_share_is_refused(fraction):
    with pytest.raises(ConfigError, match=f"fraction={fraction}"):
        most_learnable(DRAFT, REFERENCE, fraction)
