"""95 % intervals over prompts. A prompt's steps stay together: prompts are the independent units.

In: one number (or one numerator and denominator) a prompt. Out: `Estimate`.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from draftlab.evaluation.results import MIN_PROMPTS_FOR_INTERVAL, Estimate

NUM_DRAWS = 9_999


def ratio_estimate(
    numerators: ArrayLike, denominators: ArrayLike, *, seed: int, num_draws: int = NUM_DRAWS
) -> Estimate:
    """Estimate sum / sum with a cluster bootstrap over prompts (BCa, else percentile).

    Args:
        numerators: one a prompt.
        denominators: one a prompt; a prompt with 0 says nothing about the ratio and is left out.
        seed: of the resampling.
        num_draws: bootstrap samples.
    """
    over, under = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    over, under = over[under > 0], under[under > 0]
    n = len(under)
    if n == 0:
        return Estimate(None, None, None, 0, "none")
    value = float(over.sum() / under.sum())
    if n < MIN_PROMPTS_FOR_INTERVAL:
        return Estimate(value, None, None, n, "none")
    each = over / under
    if np.ptp(each) == 0:
        return Estimate(value, value, value, n, "constant")
    for method in ("BCa", "percentile"):
        low, high = _bootstrap(over, under, method, seed, num_draws)
        if math.isfinite(low) and math.isfinite(high):
            return Estimate(value, low, high, n, "bca" if method == "BCa" else "percentile")
    return Estimate(value, None, None, n, "none")


def mean_estimate(values: ArrayLike, *, seed: int, num_draws: int = NUM_DRAWS) -> Estimate:
    """Estimate a mean over prompts: a ratio whose denominators are 1."""
    array = np.asarray(values, dtype=float)
    return ratio_estimate(array, np.ones_like(array), seed=seed, num_draws=num_draws)


def paired_estimate(over: Sequence[ArrayLike], under: Sequence[ArrayLike]) -> Estimate:
    """Estimate a product of totals over a product of totals, prompts paired.

    A speedup is (baseline seconds x arm tokens) / (baseline tokens x arm seconds). The interval is
    Student's t on the log. Each prompt's contribution to that log is taken to first order (the
    delta method), so that the interval belongs to the very figure that is printed, in which long
    answers weigh more, and not to a mean of per-prompt ratios.

    Args:
        over: factors above the line, each one number a prompt.
        under: factors below the line, the same prompts in the same order.
    """
    signed = [(1, np.asarray(x, dtype=float)) for x in over]
    signed += [(-1, np.asarray(x, dtype=float)) for x in under]
    n = len(signed[0][1])
    if n == 0 or any(part.sum() <= 0 for _, part in signed):
        return Estimate(None, None, None, n, "none")
    log_ratio = sum(sign * math.log(part.sum()) for sign, part in signed)
    value = math.exp(log_ratio)
    if n < MIN_PROMPTS_FOR_INTERVAL:
        return Estimate(value, None, None, n, "none")
    influence: NDArray[np.float64] = np.zeros(n)
    for sign, part in signed:
        influence = influence + sign * part / part.mean()
    half = float(stats.t.ppf(0.975, n - 1)) * float(influence.std(ddof=1)) / math.sqrt(n)
    return Estimate(value, math.exp(log_ratio - half), math.exp(log_ratio + half), n, "t")


def _bootstrap(
    over: NDArray[np.float64], under: NDArray[np.float64], method: str, seed: int, num_draws: int
) -> tuple[float, float]:
    def ratio(a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1) -> Any:
        return a.sum(axis=axis) / b.sum(axis=axis)

    with warnings.catch_warnings():
        # BCa says "degenerate" when nearly all prompts agree; the percentile method follows then
        warnings.simplefilter("ignore")
        interval = stats.bootstrap(
            (over, under),
            ratio,
            paired=True,
            vectorized=True,
            n_resamples=num_draws,
            method=method,
            rng=np.random.default_rng(seed),
        ).confidence_interval
    return float(interval.low), float(interval.high)
