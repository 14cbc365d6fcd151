import pytest
import torch

from draftlab.objectives.weights import by_place, d_pace, decayed

PROBS = torch.tensor([[0.9, 0.2], [0.5, 0.8], [0.4, 1.0]], dtype=torch.float64)
ALL = torch.ones(3, 2, dtype=torch.bool)


def test_decay_weighs_a_depth_relative_to_the_one_before():
    assert decayed(ALL, 0.5)[:, 0].tolist() == [1.0, 0.5, 0.25]
    assert decayed(~ALL, 0.5).sum() == 0


def test_d_pace_sums_the_chances_that_this_or_a_later_depth_is_reached():
    weights = d_pace(PROBS, ALL)
    for n in range(2):
        s = [(0.5 + 0.5 * PROBS[k, n]).item() for k in range(3)]
        reached = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
        expected = [sum(reached[k:]) for k in range(3)]
        assert weights[:, n].tolist() == pytest.approx(expected)


def test_d_pace_is_the_gradient_of_the_expected_accepted_length():
    """At alpha 1: d E[accepted] / d log q_k is the sum of the chances of depths from k on."""
    log_q = PROBS.log().requires_grad_()
    log_q.exp().cumprod(0).sum().backward()
    assert torch.allclose(d_pace(PROBS, ALL, alpha=1.0), log_q.grad)


def test_predictions_that_do_not_count_have_no_weight_and_change_no_other():
    counts = torch.tensor([[True, True], [True, False], [False, True]])
    weights = d_pace(PROBS, counts)
    assert (weights[~counts] == 0).all()
    shorter = d_pace(PROBS[:2, :1], counts[:2, :1])
    assert torch.allclose(weights[:2, :1], shorter)
    without = d_pace(PROBS[[0, 2], 1:], torch.ones(2, 1, dtype=torch.bool))
    assert torch.allclose(weights[[0, 2], 1:], without)


def test_values_go_to_the_place_their_chain_starts_at():
    values = torch.tensor([[1.0, 2.0, 0.0], [0.0, 3.0, 4.0]])
    places = torch.tensor([[1, 0, 0], [0, 1, 3]])
    assert by_place(values, places, 4).tolist() == [[2.0, 1.0, 0.0, 0.0], [0.0, 3.0, 0.0, 4.0]]
