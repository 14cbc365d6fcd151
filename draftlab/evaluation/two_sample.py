"""Do two sets of draws follow one law? G-tests on binned features, and what they could have found.

In: two lists of bins a feature, one entry a draw; or two `Surplus`es. Out: a `FeatureTest` each.
Read first: compare_draws, then detectable_tv.

Bins are merged by what both sets hold together, which says nothing about the difference, so that
the chi-square law holds. Holm's correction keeps the chance of any false alarm at alpha.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy import optimize, stats

_LEAST_EXPECTED = 5
POWER = 0.9


@dataclass(frozen=True, slots=True)
class FeatureTest:
    """One feature of two sets of draws.

    Attributes:
        name: what was looked at.
        num_bins: after merging; 1 when every draw looks alike, and nothing can be tested.
        statistic: G, or a quadratic form of surpluses; chi-square under one law.
        p_value: of the statistic under one law for both.
        adjusted_p: by Holm's method over all features.
        differs: adjusted_p is below alpha.
        tv: total variation between the two histograms.
        tv_by_chance: what is expected of it when both follow one law.
        detectable_tv: a difference of this size is found with probability `POWER` at least; None
            where nothing can be tested or no difference is large enough.
    """

    name: str
    num_bins: int
    statistic: float
    p_value: float
    adjusted_p: float
    differs: bool
    tv: float
    tv_by_chance: float
    detectable_tv: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Surplus:
    """Counts of tokens by bin beside what the target's own law expected of each of them.

    Every token is drawn by a law that its prefix gives. Counts less expectations are then a sum of
    martingale steps, whose covariance is known: however an answer's tokens hang together, all of
    them may be used, and what differs between prefixes cancels.

    Attributes:
        counts: tokens by bin, [B].
        expected: sum over tokens of the bin's probability, [B].
        covariance: sum over tokens of diag(p) - p p', [B, B].
    """

    counts: np.ndarray
    expected: np.ndarray
    covariance: np.ndarray


def compare_draws(
    features: Mapping[str, tuple[Sequence[Hashable], Sequence[Hashable]]],
    surpluses: Mapping[str, tuple[Surplus, Surplus]],
    *,
    alpha: float,
) -> tuple[FeatureTest, ...]:
    """Test every feature and correct for their number.

    Args:
        features: name -> bins of the first and of the second set's draws.
        surpluses: name -> surplus of the first and of the second set's tokens.
        alpha: chance of any false alarm, in (0, 1).
    """
    tables = {name: _merge(Counter(a), Counter(b)) for name, (a, b) in features.items()}
    pairs = {name: _merge_surpluses(*pair) for name, pair in surpluses.items()}
    # a feature without two bins is no test, and takes no share of alpha
    bins = [table.shape[1] for table in tables.values()]
    bins += [len(first.counts) for first, _ in pairs.values()]
    share = alpha / max(1, sum(count > 1 for count in bins))
    found = [_test_surplus(name, *pair, alpha=share) for name, pair in pairs.items()]
    found += [_test(name, table, share) for name, table in tables.items()]
    return _correct(found, alpha)


@lru_cache(maxsize=256)
def detectable_tv(draws: int, *, freedom: int, alpha: float, power: float = POWER) -> float | None:
    """Compute the total variation that a test of two equal sets surely finds, but for 1 - power.

    With n draws a set and p the mean of both laws the noncentrality is n / 2 * sum d^2 / p, and by
    Cauchy-Schwarz sum d^2 / p >= (sum |d|)^2 = 4 TV^2, whatever the difference d looks like.

    Args:
        draws: n, of each set.
        freedom: degrees of freedom, bins - 1.
        alpha: level of this one test.
        power: chance of finding it.

    Returns:
        The total variation; None when it would exceed 1.
    """
    if freedom < 1 or draws < 1:
        return None
    limit = stats.chi2.isf(alpha, freedom)

    def lack(noncentrality: float) -> float:
        return float(stats.ncx2.sf(limit, freedom, noncentrality)) - power

    high = float(limit) + 100.0
    while lack(high) < 0:
        high *= 2
    needed = float(optimize.brentq(lack, 1e-9, high))  # pyright: ignore[reportArgumentType]
    tv = (needed / (2 * draws)) ** 0.5
    return tv if tv <= 1 else None


def _merge(first: Counter[Hashable], second: Counter[Hashable]) -> np.ndarray:
    """Make a table of two rows; the rarest bins become one until each expects enough draws."""
    pooled = first + second
    size_a, size_b = sum(first.values()), sum(second.values())
    smaller = min(size_a, size_b) / max(1, size_a + size_b)
    # ties in a fixed order, so that equal draws give equal tables
    order = sorted(pooled, key=lambda key: (-pooled[key], repr(key)))
    columns: list[list[int]] = []
    rest = np.zeros(2, dtype=np.int64)
    for key in order:
        counts = [first[key], second[key]]
        if sum(counts) * smaller >= _LEAST_EXPECTED:
            columns.append(counts)
        else:
            rest += counts
    if rest.sum() * smaller >= _LEAST_EXPECTED or not columns:
        columns.append(rest.tolist())
    else:
        columns[-1] = [a + b for a, b in zip(columns[-1], rest.tolist(), strict=True)]
    return np.array(columns).T


def _test(name: str, table: np.ndarray, alpha: float) -> FeatureTest:
    draws, bins = int(table.sum(1).min()), table.shape[1]
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)
    mean = shares.mean(0)
    by_chance = float(np.sqrt(mean * (1 - mean) / (np.pi * max(draws, 1))).sum())
    statistic, p_value = 0.0, 1.0
    if bins > 1:
        result = stats.chi2_contingency(table, correction=False, lambda_="log-likelihood")
        statistic, p_value = float(result.statistic), float(result.pvalue)  # type: ignore[attr-defined]
    return FeatureTest(
        name=name,
        num_bins=bins,
        statistic=statistic,
        p_value=p_value,
        adjusted_p=p_value,
        differs=False,
        tv=float(np.abs(shares[0] - shares[1]).sum() / 2),
        tv_by_chance=by_chance,
        detectable_tv=detectable_tv(draws, freedom=bins - 1, alpha=alpha),
    )


def _merge_surpluses(first: Surplus, second: Surplus) -> tuple[Surplus, Surplus]:
    """Put bins whose counts hardly vary into one, so that sums are nearly normal."""
    variance = np.diag(first.covariance) + np.diag(second.covariance)
    kept = np.flatnonzero(variance >= 2 * _LEAST_EXPECTED)
    rest = np.flatnonzero(variance < 2 * _LEAST_EXPECTED)
    groups = [[index] for index in kept]
    if len(rest) and variance[rest].sum() < 2 * _LEAST_EXPECTED and groups:
        groups[-1].extend(rest)
    elif len(rest):
        groups.append(list(rest))
    to_groups = np.zeros((len(groups), len(variance)))
    for group, members in enumerate(groups):
        to_groups[group, members] = 1

    def merged(one: Surplus) -> Surplus:
        covariance = to_groups @ one.covariance @ to_groups.T
        return Surplus(to_groups @ one.counts, to_groups @ one.expected, covariance)

    return merged(first), merged(second)


def _test_surplus(name: str, first: Surplus, second: Surplus, *, alpha: float) -> FeatureTest:
    sizes = [max(1.0, float(one.counts.sum())) for one in (first, second)]
    apart = (first.counts - first.expected) / sizes[0]
    apart = apart - (second.counts - second.expected) / sizes[1]
    covariance = first.covariance / sizes[0] ** 2 + second.covariance / sizes[1] ** 2
    freedom = len(apart) - 1
    statistic, p_value = 0.0, 1.0
    if freedom:
        # surpluses sum to 0, so the last bin says nothing new
        inner = np.linalg.solve(covariance[:-1, :-1], apart[:-1])
        statistic = float(apart[:-1] @ inner)
        p_value = float(stats.chi2.sf(statistic, freedom))
    spread = np.sqrt(np.diag(covariance).clip(min=0))
    return FeatureTest(
        name=name,
        num_bins=freedom + 1,
        statistic=statistic,
        p_value=p_value,
        adjusted_p=p_value,
        differs=False,
        tv=float(np.abs(apart).sum() / 2),
        tv_by_chance=float(spread.sum() / np.sqrt(2 * np.pi)),
        detectable_tv=detectable_tv(int(min(sizes)), freedom=freedom, alpha=alpha),
    )


def _correct(found: Sequence[FeatureTest], alpha: float) -> tuple[FeatureTest, ...]:
    """Adjust p-values by Holm's step-down method."""
    tests = list(found)
    order = sorted(
        (i for i, t in enumerate(tests) if t.num_bins > 1), key=lambda i: tests[i].p_value
    )
    largest = 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, tests[index].p_value * (len(order) - place)))
        tests[index] = replace(tests[index], adjusted_p=largest, differs=largest < alpha)
    return tuple(tests)
