"""Numbers and verdicts in words. Nothing is rounded into a claim it does not support."""

from dataclasses import dataclass
from typing import Literal

from draftlab.evaluation.results import (
    MIN_PROMPTS_FOR_INTERVAL,
    ArmResult,
    AuditVerdict,
    Estimate,
    EvalResult,
    SpeedStats,
    half_width,
)

Tone = Literal["good", "mixed", "bad"]
NOTHING = "–"
_LEAST_STEP_COST = 0.9  # in plain steps; it contains one, so less is a disturbed machine


@dataclass(frozen=True, slots=True)
class Verdict:
    """The report's first words.

    Attributes:
        headline: one sentence.
        lines: what a reader must know beside it.
        tone: how it is coloured.
    """

    headline: str
    lines: tuple[str, ...]
    tone: Tone


def number(value: float | None, digits: int = 2) -> str:
    """Write a number, or a dash where there is none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    """Write a share as percent."""
    return NOTHING if value is None else f"{100 * value:.{digits}f} %"


def times(value: float | None) -> str:
    """Write a ratio such as 1.42x; three digits where two would hide the side of 1."""
    if value is None:
        return NOTHING
    text = f"{value:.2f}"
    return f"{value:.3f}x" if text == "1.00" and value != 1 else f"{text}x"


def interval(estimate: Estimate, digits: int = 2) -> str:
    """Write a 95 % interval; empty where there are too few prompts for one."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.{digits}f}–{estimate.high:.{digits}f}"


def count(value: int) -> str:
    """Write a count with thousands separated."""
    return f"{value:,}"


def weights(value: int, digits: int = 1) -> str:
    """Write a number of weights, in millions or, below a tenth of one, in thousands."""
    return f"{value / 1e3:.1f} K" if value < 1e5 else f"{value / 1e6:.{digits}f} M"


def milliseconds(seconds: float | None) -> str:
    """Write a time in ms."""
    return NOTHING if seconds is None else f"{1000 * seconds:.2f} ms"


def plural(n: int, word: str) -> str:
    """Write a count and its noun."""
    return f"{count(n)} {word}" if n == 1 else f"{count(n)} {word}s"


def draft_size(arm: ArmResult) -> str:
    """Write how far an arm drafts: "K = 4", of a tree "K = 2, 9 nodes"."""
    return ", ".join([f"K = {arm.num_draft_tokens}", *([nodes(arm)] if nodes(arm) else [])])


def nodes(arm: ArmResult) -> str:
    """Write how many nodes a tree has; nothing for a chain."""
    return "" if arm.num_nodes is None else plural(arm.num_nodes, "node")


def speed_side(speedup: Estimate, noise: float) -> Literal["faster", "slower", "unclear"]:
    """Decide what a speedup supports: its whole interval must clear 1 and the noise floor."""
    if speedup.low is None or speedup.high is None:
        return "unclear"
    if speedup.low > 1 + noise:
        return "faster"
    if speedup.high < 1 - noise:
        return "slower"
    return "unclear"


def _side(speed: SpeedStats, result: EvalResult) -> Literal["faster", "slower", "unclear"]:
    """Decide what an arm's speed supports; times that cannot be support no gain."""
    side = speed_side(speed.speedup, half_width(result.noise_floor))
    return "unclear" if side == "faster" and speed.step_ratio < _LEAST_STEP_COST else side


def best_arm(result: EvalResult) -> ArmResult:
    """Give the drafter with the highest speedup, or the longest acceptance where none was timed."""

    def rank(arm: ArmResult) -> tuple[float, float]:
        speed = arm.speed.speedup.value if arm.speed else None
        return (speed or 0.0, arm.acceptance.tau.value or 0.0)

    return max(result.arms, key=rank)


def verdict(result: EvalResult) -> Verdict:
    """Say what was found: output first if it is wrong, else speed."""
    best = best_arm(result)
    lines = [lossy_words(arm) for arm in result.arms if arm.is_lossy]
    lines += [line for arm in result.arms if (line := _arm_line(arm, result))]
    if best.speed and _side(best.speed, result) != "faster":
        lines.append(why_not_faster(best.name, best.speed))
    lines += [
        f"{arm.name}: {audit_words(arm.audit, is_lossy=arm.is_lossy)}"
        for arm in result.arms
        if arm.audit
    ]
    weakest = _weakest_domain(best)
    if weakest:
        lines.append(weakest)
    if result.num_defects:
        head = (
            f"Do not use this: {plural(result.num_defects, 'output token')} differ from what the "
            "target alone produces"
        )
        return Verdict(f"{head}.", tuple(lines), "bad")
    head = _headline(best, result)
    if best.is_lossy:
        head = f"LOSSY, not a lossless speedup: {head}"
    return Verdict(head, tuple(lines), _tone(best, result))


def _headline(best: ArmResult, result: EvalResult) -> str:
    unchanged = _unchanged(best)
    if best.speed is None:
        tau = number(best.acceptance.tau.value)
        return f"{best.name} emits {tau} tokens a verify step{unchanged}; speed was not measured."
    speedup = best.speed.speedup
    side = _side(best.speed, result)
    ci = f" (95 % CI {interval(speedup)})" if interval(speedup) else ""
    if side == "faster":
        return (
            f"{best.name} decodes {times(speedup.value)} as fast{ci} as the same engine without "
            f"drafting{unchanged}."
        )
    if side == "slower":
        return (
            f"No drafter makes decoding faster here: the best, {best.name}, runs at "
            f"{times(speedup.value)}{ci} of plain decoding{unchanged}."
        )
    if speedup.low is None:
        return (
            f"{best.name} ran at {times(speedup.value)} of plain decoding on only "
            f"{plural(speedup.num_prompts, 'prompt')}: too few to claim a speedup{unchanged}."
        )
    return (
        f"No difference in speed can be claimed: {best.name} runs at {times(speedup.value)}{ci} of "
        f"plain decoding{unchanged}."
    )


def lossy_words(arm: ArmResult) -> str:
    """Say what a lossy rule means for everything that is told of an arm."""
    return (
        f"{arm.name}: its acceptance rule does not keep the target's law, so its answers differ "
        "from what the target alone would say, and its speed is not that of a lossless drafter."
    )


def _unchanged(arm: ArmResult) -> str:
    if arm.is_lossy:
        return ", and its answers do not have the target's law"
    if arm.audit is None:
        return "; losslessness was not audited"
    if not arm.audit.is_greedy:
        return ", and every sampled token is one the target can produce"
    return ", output unchanged" if arm.audit.is_lossless else ""


def _tone(best: ArmResult, result: EvalResult) -> Tone:
    if best.speed is None or best.audit is None:
        return "mixed"
    side = _side(best.speed, result)
    if best.is_lossy and side == "faster":
        return "mixed"
    return {"faster": "good", "slower": "bad", "unclear": "mixed"}[side]  # type: ignore[return-value]


def _arm_line(arm: ArmResult, result: EvalResult) -> str:
    if arm.speed is None:
        return ""
    speedup = arm.speed.speedup
    ci = interval(speedup)
    span = f"95 % CI {ci}" if ci else f"no interval below {MIN_PROMPTS_FOR_INTERVAL} prompts"
    tau = arm.acceptance.tau
    bounds = f" ({interval(tau)})" if interval(tau) else ""
    line = (
        f"{arm.name} ({draft_size(arm)}): tau {number(tau.value)}{bounds}, "
        f"{times(speedup.value)} ({span}, "
        f"{plural(speedup.num_prompts, 'prompt')}), {1 / arm.speed.baseline_token_s:.1f} to "
        f"{1 / arm.speed.token_s:.1f} tokens/s at batch 1"
    )
    side = _side(arm.speed, result)
    if side == "slower":
        return f"{line}: slower than plain decoding."
    if side == "unclear" and ci:
        return f"{line}: not distinguishable from plain decoding."
    return f"{line}."


def why_not_faster(name: str, speed: SpeedStats) -> str:
    """Say in one sentence what a drafter's speed is up against."""
    cost = number(speed.step_ratio)
    if speed.step_ratio < _LEAST_STEP_COST:
        return (
            f"Why: a verify step of {name} was measured at {cost} plain steps, and it contains "
            "one: the machine was disturbed; measure again on an idle one."
        )
    end = "" if speed.tau <= speed.step_ratio else ", too little above it to be told from noise"
    return (
        f"Why: a verify step of {name} costs {cost} plain steps (drafting "
        f"{number(speed.draft_ratio)}, verification {number(speed.verify_ratio)}), so tau must "
        f"exceed {cost} to pay off; on the timed answers it is {number(speed.tau)}{end}."
    )


def audit_words(audit: AuditVerdict, *, is_lossy: bool = False) -> str:
    """Say what the audit found in one sentence."""
    positions = plural(audit.num_positions, "output position")
    if is_lossy:
        return (
            f"lossless: NO, the rule is LOSSY. {plural(audit.num_defects, 'token')} of {positions} "
            "had no probability under the target."
        )
    if not audit.is_greedy:
        checked = f"{plural(audit.num_defects, 'token')} of {positions} had no probability"
        return f"sampled, {checked} under the target; the law itself was not tested here."
    answer = "yes" if audit.is_lossless else "NO"
    same = (
        f"; {count(audit.num_identical)} of {count(audit.num_compared)} timed answers equal plain "
        "decoding token for token"
        if audit.num_compared
        else ""
    )
    ties = (
        f", {plural(audit.num_ties, 'numerical tie')} within {audit.tolerance:.2g} logit units"
        if audit.num_ties
        else ""
    )
    return f"lossless: {answer}. {plural(audit.num_defects, 'defect')} in {positions}{ties}{same}."


def _weakest_domain(arm: ArmResult) -> str:
    rated = [d for d in arm.domains if d.acceptance.tau.value is not None]
    if len(rated) < 2:
        return ""
    worst = min(rated, key=lambda d: d.acceptance.tau.value or 0.0)
    best = max(rated, key=lambda d: d.acceptance.tau.value or 0.0)
    return (
        f"{arm.name} is weakest on {worst.domain} (tau {number(worst.acceptance.tau.value)}) and "
        f"strongest on {best.domain} (tau {number(best.acceptance.tau.value)})."
    )
