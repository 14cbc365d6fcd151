"""The learning rate of every optimizer step, as a pure function.

Steps are optimizer steps, counted 1..total, whatever the number of processes or the accumulation
(case O-23).
"""

import math

from draftlab.training.settings import OptimSettings


def lr_factor(step: int, total: int, settings: OptimSettings) -> float:
    """Compute the share of the peak learning rate that a step uses.

    The peak is reached exactly at the end of the warm-up (at step 1 without one), and
    `min_lr_fraction` exactly at the last step; `constant` stays at the peak.

    Args:
        step: optimizer step, 1..total.
        total: optimizer steps of the whole training.
        settings: warm-up and shape.
    """
    peak = max(1, round(settings.warmup_fraction * total))
    if step < peak:
        return step / peak
    low = settings.min_lr_fraction
    match settings.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - low) * _progress(step, peak, total)
        case "cosine":
            return low + (1.0 - low) * 0.5 * (
                1.0 + math.cos(math.pi * _progress(step, peak, total))
            )
        case "wsd":
            start = max(peak, total - round(settings.wsd_decay_fraction * total))
            return 1.0 - (1.0 - low) * _progress(step, start, total)


def _progress(step: int, start: int, total: int) -> float:
    return max(0, step - start) / max(1, total - start)
