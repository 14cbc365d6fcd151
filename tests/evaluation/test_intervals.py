import numpy as np
import pytest

from draftlab.evaluation.intervals import mean_estimate, paired_estimate, ratio_estimate


def test_the_cluster_bootstrap_covers_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(150):
        steps = rng.integers(20, 60, 14)
        own = 1.6 + 0.3 * rng.standard_normal(14)
        e = ratio_estimate(steps * own, steps, seed=trial, num_draws=400)
        covered += e.low <= 1.6 <= e.high
    # nominal 95 %; bootstraps fall a little short at n = 14, and a wrong one by far
    assert 0.86 <= covered / 150 <= 1.0


def test_an_interval_that_took_steps_for_independent_would_be_too_narrow():
    # ten prompts of a hundred equal steps each: the prompts are what varies
    taus = np.linspace(1, 2, 10)
    e = ratio_estimate(100 * taus, np.full(10, 100), seed=0)
    naive = 1.96 * np.repeat(taus, 100).std() / np.sqrt(1000)
    assert (e.high - e.low) / 2 > 5 * naive


def test_the_paired_interval_covers_the_true_speedup():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        tokens = rng.integers(30, 120, 12)
        plain = tokens * 0.01 * np.exp(0.03 * rng.standard_normal(12))
        fast = tokens * 0.01 / 1.3 * np.exp(0.2 * rng.standard_normal(12)) / np.exp(0.02)
        e = paired_estimate([plain, tokens], [tokens, fast])
        covered += e.low <= 1.3 <= e.high
    assert 0.90 <= covered / 300 <= 0.99


def test_a_drift_that_both_arms_share_does_not_widen_the_paired_interval():
    drift = np.linspace(1, 3, 12)
    tokens = np.full(12, 64)
    e = paired_estimate([0.02 * drift * tokens, tokens], [tokens, 0.01 * drift * tokens])
    assert e.value == pytest.approx(2.0)
    assert e.high - e.low < 1e-9


def test_equal_prompts_give_a_point_that_says_so():
    e = mean_estimate([5.0] * 9, seed=0)
    assert (e.low, e.high, e.method) == (5.0, 5.0, "constant")


def test_prompts_that_never_reached_a_depth_do_not_count_towards_it():
    e = ratio_estimate([1, 0, 2], [2, 0, 2], seed=0)
    assert (e.value, e.num_prompts) == (0.75, 2)


def test_a_nearly_constant_sample_still_gets_a_finite_interval():
    e = mean_estimate([1.0] * 11 + [2.0], seed=0)
    assert np.isfinite([e.low, e.high]).all()
