"""The two-sample test: silent under one law, loud under two, and honest about what it can find.

All draws have fixed seeds. Power: at 2,000 draws a set, alpha 0.001 and 8 bins, differences of
0.09 in total variation are found with 90 % or more (`detectable_tv`); the negative controls are
larger.
"""

import numpy as np
import pytest
from scipy import stats

from draftlab.evaluation.two_sample import POWER, Surplus, compare_draws, detectable_tv

LAW = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.05, 0.05])
ALPHA = 1e-3


def draws(law, count, seed):
    return np.random.default_rng(seed).choice(len(law), size=count, p=law).tolist()


def moved(law, amount):
    """Take mass off the first bin and give it to the last."""
    law = law.copy()
    law[0] -= amount
    law[-1] += amount
    return law


def one(first, second, **kwargs):
    (test,) = compare_draws({"x": (first, second)}, {}, alpha=ALPHA, **kwargs)
    return test


def test_p_values_are_uniform_when_both_sets_follow_one_law():
    found = [one(draws(LAW, 400, s), draws(LAW, 400, 10_000 + s)).p_value for s in range(300)]
    assert stats.kstest(found, "uniform").pvalue > 1e-3


def test_a_difference_is_found_and_one_law_is_not_accused():
    first = draws(LAW, 2000, 0)
    assert not one(first, draws(LAW, 2000, 1)).differs
    test = one(first, draws(moved(LAW, 0.12), 2000, 2))
    assert test.differs
    assert test.tv == pytest.approx(0.12, abs=0.03)


def test_the_stated_size_is_found_as_often_as_stated():
    limit = detectable_tv(2000, freedom=7, alpha=ALPHA)
    assert limit == pytest.approx(0.085, abs=0.01)
    # two bins of one half each: the hardest direction, where the bound is met
    size = detectable_tv(1000, freedom=1, alpha=ALPHA)
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(400):
        a = rng.random(1000) < 0.5 - size / 2
        b = rng.random(1000) < 0.5 + size / 2
        hits += one(a.tolist(), b.tolist()).differs
    assert POWER - 0.05 < hits / 400 < POWER + 0.05


def test_rare_bins_are_merged_until_each_expects_enough_draws():
    first = [0] * 50 + list(range(1, 21))
    second = [0] * 50 + list(range(21, 41))
    test = one(first, second)
    assert test.num_bins == 2
    assert test.statistic == pytest.approx(0)


def test_answers_that_are_all_alike_are_no_test():
    test = one([1] * 100, [1] * 100)
    assert (test.num_bins, test.p_value, test.detectable_tv) == (1, 1.0, None)


def test_many_features_share_alpha():
    features = {str(i): (draws(LAW, 500, i), draws(LAW, 500, 500 + i)) for i in range(8)}
    tests = compare_draws(features, {}, alpha=ALPHA)
    assert not any(test.differs for test in tests)
    smallest = min(tests, key=lambda test: test.p_value)
    assert smallest.adjusted_p == pytest.approx(min(1, 8 * smallest.p_value))
    assert all(test.adjusted_p >= test.p_value for test in tests)


def surplus(laws, real, seed):
    """Draw one token a prefix by `real`, and expect what `laws` say."""
    rng = np.random.default_rng(seed)
    bins = (rng.random((len(real), 1)) > real.cumsum(1)).sum(1).clip(max=real.shape[1] - 1)
    return Surplus(
        np.bincount(bins, minlength=laws.shape[1]).astype(float),
        laws.sum(0),
        np.diag(laws.sum(0)) - laws.T @ laws,
    )


def test_prefixes_that_differ_between_the_sets_do_not_matter_to_surpluses():
    rng = np.random.default_rng(0)
    peaked, flat = rng.dirichlet([0.2] * 6, 3000), rng.dirichlet([3.0] * 6, 3000)
    pair = (surplus(peaked, peaked, 1), surplus(flat, flat, 2))
    (test,) = compare_draws({}, {"x": pair}, alpha=ALPHA)
    assert not test.differs
    wrong = 0.85 * flat + 0.15 * np.eye(6)[0]
    (test,) = compare_draws({}, {"x": (pair[0], surplus(flat, wrong, 3))}, alpha=ALPHA)
    assert test.differs


def test_surpluses_give_uniform_p_values_under_one_law():
    rng = np.random.default_rng(5)
    found = []
    for seed in range(200):
        laws = rng.dirichlet([0.5] * 5, (2, 400))
        pair = tuple(surplus(law, law, 2 * seed + i) for i, law in enumerate(laws))
        found.append(compare_draws({}, {"x": pair}, alpha=ALPHA)[0].p_value)
    assert stats.kstest(found, "uniform").pvalue > 1e-3
