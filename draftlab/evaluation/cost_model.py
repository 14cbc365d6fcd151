"""What speculation should give by what its parts cost alone, against what it gave.

In: pass times t(T) and rounds split into target, drafter and the rest, measured apart; answers that
were timed. Out: a `CostModel` an arm.

speedup = tau * t_AR / (t_draft + t_verify(T) + t_misc), after Leviathan et al. (arXiv:2211.17192,
theorem 3.8) with every cost measured. A gap beyond 10 % says that a round costs something that its
parts do not.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.host_share import HostShare
from draftlab.evaluation.speed import Clock, Timing
from draftlab.targets.step import Step
from draftlab.targets.target import Target

GAP = 0.10  # beyond it a run says so


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds a round, and the speedups that follow from them and that were seen.

    Attributes:
        tau: tokens a verify step.
        plain_s: t_AR, a round without drafts: a pass over one token, and the decoder's own time.
        draft_s: t_draft, the drafter's proposal and observation.
        verify_s: t_verify, a pass over the anchor and the draft tokens, at the widths that were
            verified.
        misc_s: t_misc, what is neither.
        measured: speedup of the timed answers, prefill not in it.
    """

    tau: float
    plain_s: float
    draft_s: float
    verify_s: float
    misc_s: float
    measured: float

    @property
    def predicted(self) -> float:
        """Speedup that the parts give together."""
        return self.tau * self.plain_s / (self.draft_s + self.verify_s + self.misc_s)

    @property
    def gap(self) -> float:
        """How far the measured speedup lies above (or below, negative) the predicted one."""
        return self.measured / self.predicted - 1

    def describe_gap(self, arm: str) -> str | None:
        """Say in words that the two differ by more than a tenth; None when they do not."""
        if abs(self.gap) <= GAP:
            return None
        side = "above" if self.gap > 0 else "below"
        return (
            f"{arm}: measured {self.measured:.2f}x is {abs(self.gap):.0%} {side} the "
            f"{self.predicted:.2f}x that tau {self.tau:.2f} and the parts' times predict: the "
            "machine was unsteady, or a round costs something that its parts do not"
        )


def compare_with_model(
    timings: Sequence[Timing],
    *,
    arm: str,
    baseline: str,
    curve: TimeCurve,
    shares: dict[str, HostShare],
) -> CostModel | None:
    """Predict an arm's speedup from parts measured apart, and put the measured one beside it.

    Args:
        timings: of both arms.
        arm: name of the drafter's arm.
        baseline: name of the arm without a drafter.
        curve: pass times by width.
        shares: rounds of both arms, split.

    Returns:
        None when either arm has no verify step.
    """
    mine = [t for t in timings if t.arm == arm]
    plain = [t for t in timings if t.arm == baseline]
    steps = [step for t in mine for step in t.generation.steps]
    emitted, plain_emitted = (sum(t.num_decoded for t in group) for group in (mine, plain))
    if not emitted or not plain_emitted:
        return None
    token_s = sum(t.generation.decode_s for t in mine) / emitted
    plain_token_s = sum(t.generation.decode_s for t in plain) / plain_emitted
    share, plain_share = shares[arm], shares[baseline]
    return CostModel(
        tau=emitted / len(steps),
        plain_s=curve.at(1) + plain_share.host_s / plain_share.num_rounds,
        draft_s=share.drafter_s / share.num_rounds,
        verify_s=statistics.fmean(curve.at(step.num_drafted + 1) for step in steps),
        misc_s=share.host_s / share.num_rounds,
        measured=plain_token_s / token_s,
    )


def measure_passes(
    target: Target,
    *,
    widths: Sequence[int],
    base: int,
    rows: int,
    repeats: int,
    clock: Clock,
) -> TimeCurve:
    """Time passes over 1, 2, ... tokens a row, widths in turns, and take each one's median.

    Args:
        target: whose passes.
        widths: T, ascending.
        base: committed tokens of every row.
        rows: sequences.
        repeats: times each width is timed, after one that is not.
        clock: waits for the device.
    """
    device = target.device
    spent: dict[int, list[float]] = {width: [] for width in widths}
    kv = target.open_kv(rows, base + widths[-1])
    with torch.inference_mode():
        steps = {
            width: Step(
                rows=torch.arange(rows, device=device),
                ids=torch.ones(rows, width, dtype=torch.int64, device=device),
                base=torch.full((rows,), base, dtype=torch.int64, device=device),
                live=base + width,
            )
            for width in widths
        }
    for turn in range(1 + repeats):
        for width in widths:
            began = clock.read()
            target.run(kv, steps[width])
            seconds = clock.read() - began
            if turn:
                spent[width].append(seconds)
    return TimeCurve(tuple(widths), tuple(statistics.median(spent[width]) for width in widths))
