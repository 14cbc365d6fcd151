import pytest

from draftlab.evaluation.acceptance import compute_acceptance, repeated_positions
from tests.evaluation.scripted import generation, step


def of_scripted_draft(accepted, drafted=4, num_steps=5, num_prompts=10):
    """Case O-31: a draft that is right at places 1..accepted and wrong after."""
    return compute_acceptance(
        [generation([step(drafted, accepted)] * num_steps, index=i) for i in range(num_prompts)],
        seed=0,
    )


def values(estimates):
    return [e.value for e in estimates]


def test_a_perfect_draft_gives_the_exact_figures_of_every_definition():
    stats = of_scripted_draft(4)
    assert stats.tau.value == stats.tau_macro.value == stats.tau_uncut.value == 5.0
    assert stats.accepted_per_step.value == 4.0
    assert stats.acceptance_rate.value == 1.0
    assert values(stats.survival) == values(stats.alpha) == [1, 1, 1, 1]
    assert stats.emitted_histogram == (0, 0, 0, 0, 0, 50)


def test_a_draft_that_is_never_right_gives_one_token_a_step_and_no_figure_past_depth_one():
    stats = of_scripted_draft(0)
    assert stats.tau.value == 1.0
    assert stats.accepted_per_step.value == 0.0
    assert stats.acceptance_rate.value == 0.0
    assert values(stats.survival) == [0, 0, 0, 0]
    assert values(stats.alpha) == [0, None, None, None]


def test_a_draft_right_twice_gives_three_tokens_a_step():
    stats = of_scripted_draft(2)
    assert stats.tau.value == 3.0
    assert stats.accepted_per_step.value == 2.0
    assert stats.acceptance_rate.value == 0.5
    assert values(stats.survival) == [1, 1, 0, 0]
    assert values(stats.alpha) == [1, 1, 0, None]


def test_the_token_from_prefill_is_no_step():
    stats = compute_acceptance([generation([step(4, 4)])], seed=0)
    assert (stats.num_steps, stats.num_emitted, stats.tau.value) == (1, 5, 5.0)


def test_a_cut_last_step_counts_what_it_emitted_in_tau_and_what_it_accepted_in_uncut_tau():
    stats = compute_acceptance([generation([step(4, 4), step(4, 3, emitted=1)])], seed=0)
    assert stats.tau.value == 3.0
    assert stats.tau_uncut.value == 1 + 7 / 2


def test_pooled_tau_weighs_steps_and_macro_tau_weighs_conversations():
    short = generation([step(4, 4)])
    long = generation([step(4, 0)] * 9, index=1)
    stats = compute_acceptance([short, long], seed=0)
    assert stats.tau.value == pytest.approx(14 / 10)
    assert stats.tau_macro.value == pytest.approx((5 + 1) / 2)


def test_alpha_counts_only_steps_that_drafted_that_deep():
    # the second step proposed one token only, so it says nothing of depth 2
    stats = compute_acceptance([generation([step(2, 2), step(1, 1)])], seed=0)
    assert values(stats.alpha) == [1, 1]
    assert values(stats.survival) == [1, 0.5]


def test_answers_without_a_verify_step_are_left_out():
    stats = compute_acceptance([generation([]), generation([step(4, 2)], index=1)], seed=0)
    assert stats.num_prompts == 1
    assert stats.tau.value == 3.0


def test_nothing_observed_gives_no_figure_rather_than_zero():
    stats = compute_acceptance([], seed=0)
    assert stats.tau.value is None
    assert stats.survival == ()


def test_overlap_is_averaged_over_the_depths_reached():
    steps = [step(2, 1, overlaps=(0.8, 0.4)), step(2, 0, overlaps=(0.6,))]
    assert values(compute_acceptance([generation(steps)], seed=0).overlap) == pytest.approx(
        [0.7, 0.4]
    )


def test_no_interval_is_given_below_eight_prompts():
    assert of_scripted_draft(2, num_prompts=7).tau.low is None
    varied = [generation([step(4, i % 4)] * 5, index=i) for i in range(8)]
    tau = compute_acceptance(varied, seed=0).tau
    assert tau.low < tau.value < tau.high


def test_the_same_seed_gives_the_same_interval():
    varied = [generation([step(4, i % 4)] * 5, index=i) for i in range(12)]
    assert compute_acceptance(varied, seed=3) == compute_acceptance(varied, seed=3)


def test_tokens_of_a_loop_are_found_from_their_second_round_on():
    loop = list(range(16)) * 3
    assert repeated_positions(loop) == set(range(16, 48))
    assert repeated_positions(list(range(48))) == set()


def test_tau_without_repeats_leaves_out_the_steps_of_a_loop():
    # 1 token from prefill, 16 plain steps of fresh text, then the same text in steps of four
    text = list(range(16))
    steps = [step(3, 0)] * 16 + [step(3, 3)] * 4
    stats = compute_acceptance([generation(steps, ids=[99, *text, *text])], seed=0)
    assert stats.tau.value == pytest.approx(32 / 20)
    assert stats.tau_without_repeats.value == 1.0
    assert stats.repeated_share.value == pytest.approx(16 / 33)
