"""95 % intervals over prompts. A prompt's steps stay together: prompts are the independent units.

In: one number (or one numerator and denominator) a prompt. Out: `Estimate`.
"""

import math
import warnings

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


def speedup_estimate(
    baseline_s: ArrayLike, baseline_tokens: ArrayLike, arm_s: ArrayLike, arm_tokens: ArrayLike
) -> Estimate:
    """Estimate (baseline seconds a token) / (arm seconds a token), totals over totals, paired.

    The interval is Student's t on the log of the ratio. Each prompt's contribution to that log is
    taken to first order (the delta method), so that the interval belongs to the very figure that
    is printed, in which long answers weigh more, and not to a mean of per-prompt ratios.

    Args:
        baseline_s: decode seconds of each prompt in the baseline arm.
        baseline_tokens: tokens they gave.
        arm_s: decode seconds of the same prompts in the other arm.
        arm_tokens: tokens they gave.
    """
    parts = [np.asarray(x, dtype=float) for x in (baseline_s, baseline_tokens, arm_s, arm_tokens)]
    n = len(parts[0])
    if n == 0 or any(part.sum() <= 0 for part in parts):
        return Estimate(None, None, None, n, "none")
    signs = (1, -1, -1, 1)
    log_ratio = sum(s * math.log(part.sum()) for s, part in zip(signs, parts, strict=True))
    value = math.exp(log_ratio)
    if n < MIN_PROMPTS_FOR_INTERVAL:
        return Estimate(value, None, None, n, "none")
    influence: NDArray[np.float64] = np.zeros(n)
    for sign, part in zip(signs, parts, strict=True):
        influence = influence + sign * part / part.mean()
    half = float(stats.t.ppf(0.975, n - 1)) * float(influence.std(ddof=1)) / math.sqrt(n)
    return Estimate(value, math.exp(log_ratio - half), math.exp(log_ratio + half), n, "t")


def _bootstrap(
    over: NDArray[np.float64], under: NDArray[np.float64], method: str, seed: int, num_draws: int
) -> tuple[float, float]:
    def ratio(
        a: NDArray[np.float64], b: NDArray[np.float64], axis: int = -1
    ) -> NDArray[np.float64]:
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
