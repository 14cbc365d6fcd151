import pytest
import torch

from draftlab.errors import ConfigError
from draftlab.objectives.selection import most_learnable

DRAFT = torch.tensor([3.0, 1.0, 2.0, 5.0, 0.5])
REFERENCE = torch.tensor([2.9, 0.1, 1.5, 4.9, 0.5])
ONE = torch.zeros(5, dtype=torch.int64)


def test_tokens_are_chosen_by_how_far_the_draft_is_behind_not_by_their_loss():
    assert most_learnable(DRAFT, REFERENCE, ONE, 0.4).tolist() == [False, True, True, False, False]


def test_the_whole_share_keeps_all_and_a_tiny_one_keeps_one():
    assert most_learnable(DRAFT, REFERENCE, ONE, 1.0).all()
    expected = [False, True, False, False, False]
    assert most_learnable(DRAFT, REFERENCE, ONE, 0.01).tolist() == expected


def test_a_sequence_s_choice_is_the_same_whatever_it_is_batched_with():
    generator = torch.Generator().manual_seed(0)
    draft, reference = torch.rand(2, 40, generator=generator).unbind()
    sequences = torch.randint(0, 4, (40,), generator=generator)
    together = most_learnable(draft, reference, sequences, 0.3)
    for number in range(4):
        own = sequences == number
        alone = most_learnable(draft[own], reference[own], torch.zeros_like(sequences[own]), 0.3)
        assert torch.equal(together[own], alone)
        assert alone.sum() == max(1, round(0.3 * int(own.sum())))


def test_among_all_tokens_at_once_the_choice_would_hang_on_batch_mates():
    """The negative control: one number for all sequences is another choice."""
    sequences = torch.tensor([0, 0, 1, 1, 1])
    apart = most_learnable(DRAFT, REFERENCE, sequences, 0.4)
    assert apart.tolist() == [False, True, True, False, False]
    gone = most_learnable(DRAFT - 2 * (sequences == 1), REFERENCE, sequences, 0.4)
    assert torch.equal(gone, apart)
    mixed = most_learnable(DRAFT - 2 * (sequences == 1), REFERENCE, ONE, 0.4)
    assert mixed.tolist() == [True, True, False, False, False]


def test_no_tokens_give_no_choice():
    assert most_learnable(DRAFT[:0], REFERENCE[:0], ONE[:0], 0.4).shape == (0,)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_a_fraction_that_is_no_share_is_refused(fraction):
    with pytest.raises(ConfigError, match=f"fraction={fraction}"):
        most_learnable(DRAFT, REFERENCE, ONE, fraction)
