"""What an evaluation found, as plain frozen data with a JSON form. No torch here: reports read it.

Read first: Estimate, then EvalResult from the bottom up.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftlab.errors import CheckpointError, ConfigError

FORMAT = 1
BASELINE = "baseline"
# below this many prompts no interval is given: at n = 4 a percentile bootstrap covers 81 %
MIN_PROMPTS_FOR_INTERVAL = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % confidence interval over prompts.

    Attributes:
        value: None where nothing was observed, such as a depth that no draft reached.
        low: lower end; None where there are too few prompts for an interval.
        high: upper end; None where there are too few prompts for an interval.
        num_prompts: prompts the figure rests on.
        method: bca or percentile (cluster bootstrap), t (log ratio), constant (every prompt gave
            the same value, so resampling cannot move it), none.
    """

    value: float | None
    low: float | None
    high: float | None
    num_prompts: int
    method: Literal["bca", "percentile", "t", "constant", "none"]


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """How many draft tokens the target kept. Lists are by depth, depth 1 first.

    Attributes:
        num_prompts: conversations with at least one verify step.
        num_steps: verify steps; the pass that gives the first token is none.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens accepted, before end or length cuts.
        num_emitted: tokens emitted by verify steps, next token included, after cuts.
        tau: tokens emitted / verify steps, pooled. The headline acceptance length.
        tau_macro: mean over conversations of the same ratio.
        tau_uncut: 1 + accepted / verify steps, before cuts.
        accepted_per_step: accepted / verify steps.
        acceptance_rate: accepted / drafted.
        survival: share of verify steps that accepted at least k draft tokens.
        alpha: of the steps that verified a draft token at depth k with all before it accepted, the
            share that accepted it. Of a tree every step that accepted k - 1 tokens counts, also one
            whose tree went no deeper there.
        overlap: mean of sum min(p, q) at depths reached; empty when greedy.
        emitted_histogram: verify steps that emitted 0, 1, 2, ... tokens.
        share_with_draft: share of verify steps that had at least one draft token.
        repeated_share: share of output tokens inside a 16-gram that the answer had already.
        tau_without_repeats: tau over the steps that emitted no such token.
    """

    num_prompts: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int
    tau: Estimate
    tau_macro: Estimate
    tau_uncut: Estimate
    accepted_per_step: Estimate
    acceptance_rate: Estimate
    survival: tuple[Estimate, ...]
    alpha: tuple[Estimate, ...]
    overlap: tuple[Estimate, ...]
    emitted_histogram: tuple[int, ...]
    share_with_draft: Estimate
    repeated_share: Estimate
    tau_without_repeats: Estimate


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean seconds of one verify step, by stage.

    Attributes:
        draft_s: the drafter's proposal.
        verify_s: the target's pass and the acceptance rule.
        commit_s: bookkeeping and the drafter's observation.
        other_s: what the three do not account for.
    """

    draft_s: float
    verify_s: float
    commit_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.draft_s + self.verify_s + self.commit_s + self.other_s


@dataclass(frozen=True, slots=True)
class SpeedStats:
    """Speed at batch 1 against the baseline on the same prompts in the same process.

    Attributes:
        num_prompts: prompts both arms decoded beyond the first token.
        num_repeats: times each prompt was timed in each arm.
        baseline_tokens: tokens timed in the baseline arm, first tokens not counted.
        tokens: tokens timed in this arm, first tokens not counted.
        baseline_token_s: decode seconds a token, baseline.
        token_s: decode seconds a token, this arm.
        speedup: baseline_token_s / token_s; prefill is not in it.
        end_to_end_speedup: the same with prefill and all overhead, over all output tokens.
        speedup_by_repeat: speedup of each repeat by itself.
        baseline_first_token_s: median time to first token, baseline.
        first_token_s: median time to first token, this arm.
        baseline_step_s: seconds of one baseline step, which emits one token.
        step: seconds of one verify step of this arm.
        tau: acceptance length on the timed outputs.
        predicted_speedup: tau / (draft_ratio + verify_ratio): what drafting and verifying alone
            would give; the measured speedup falls short of it by bookkeeping.
        num_identical: prompts whose output equals the baseline's, token for token.
    """

    num_prompts: int
    num_repeats: int
    baseline_tokens: int
    tokens: int
    baseline_token_s: float
    token_s: float
    speedup: Estimate
    end_to_end_speedup: Estimate
    speedup_by_repeat: tuple[float, ...]
    baseline_first_token_s: float
    first_token_s: float
    baseline_step_s: float
    step: StepTime
    tau: float
    predicted_speedup: float
    num_identical: int

    @property
    def draft_ratio(self) -> float:
        """Drafting time of a step as a share of a baseline step."""
        return self.step.draft_s / self.baseline_step_s

    @property
    def verify_ratio(self) -> float:
        """Verification time of a step as a share of a baseline step."""
        return self.step.verify_s / self.baseline_step_s

    @property
    def step_ratio(self) -> float:
        """A whole verify step over a baseline step; also the acceptance length to break even."""
        return self.step.total_s / self.baseline_step_s


@dataclass(frozen=True, slots=True)
class Defect:
    """One output token that the target alone would not have produced.

    Attributes:
        prompt: index of the prompt.
        position: place in the output, 0 is the first token.
        emitted_id: what came out.
        expected_id: the target's own choice there.
        margin: how far the emitted token's logit lies below the largest.
    """

    prompt: int
    position: int
    emitted_id: int
    expected_id: int
    margin: float


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Losslessness of the outputs that were timed.

    Attributes:
        is_greedy: False when sampled: then only p > 0 of every token is checked.
        num_prompts: outputs audited.
        num_positions: output tokens re-scored, one token wide, by the target.
        num_exact: tokens that are the target's own choice (sampled: tokens with p > 0).
        num_ties: tokens below the maximum by no more than the tolerance.
        num_defects: tokens beyond it, and tokens after an end token.
        tolerance: logit units; 0 where identity is required, or where no token needed one.
        requires_identity: the load probe found wide and narrow passes bitwise equal.
        worst_margin: largest margin seen, logit units.
        num_compared: outputs compared with the baseline's.
        num_identical: of them equal token for token.
        first_divergence: median place of the first difference; None without one.
        defects: the first of them, at most 20.
    """

    is_greedy: bool
    num_prompts: int
    num_positions: int
    num_exact: int
    num_ties: int
    num_defects: int
    tolerance: float
    requires_identity: bool
    worst_margin: float
    num_compared: int
    num_identical: int
    first_divergence: float | None
    defects: tuple[Defect, ...]

    @property
    def is_lossless(self) -> bool:
        """True when no defect was found."""
        return self.num_defects == 0


@dataclass(frozen=True, slots=True)
class LengthOption:
    """What one K is expected to give.

    Attributes:
        num_draft_tokens: K.
        tau: 1 + sum of survival up to K, on validation prompts.
        step_s: measured seconds of a verify step at K.
        tokens_per_s: tau / step_s.
    """

    num_draft_tokens: int
    tau: float
    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """Why a drafter runs with its K.

    Attributes:
        num_draft_tokens: the K chosen.
        options: all K that were tried.
        num_prompts: validation prompts used.
        method: how the choice was made, in words.
    """

    num_draft_tokens: int
    options: tuple[LengthOption, ...]
    num_prompts: int
    method: str


@dataclass(frozen=True, slots=True)
class DomainResult:
    """One drafter on one domain."""

    domain: str
    acceptance: AcceptanceStats
    speed: SpeedStats | None


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One drafter on the whole suite.

    Attributes:
        name: what the report calls it.
        kind: the drafter's kind.
        num_parameters: trainable parameters; 0 for n-gram.
        num_draft_tokens: K it ran with: draft tokens of a chain, or levels of a tree.
        choice: how K was chosen; None when it was given.
        acceptance: all domains pooled.
        speed: all domains pooled; None when not timed.
        audit: of the timed outputs; None when not audited.
        domains: in the suite's order.
        is_lossy: its rule does not keep the target's law; its name says so too.
        num_nodes: draft nodes of a tree at most; None for a chain.
        folder: that its weights were read from; None for one built on the spot, or not known.
    """

    name: str
    kind: str
    num_parameters: int
    num_draft_tokens: int
    choice: LengthChoice | None
    acceptance: AcceptanceStats
    speed: SpeedStats | None
    audit: AuditVerdict | None
    domains: tuple[DomainResult, ...]
    is_lossy: bool = False
    num_nodes: int | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Everything one suite found about one target.

    Attributes:
        format: of this record; readers refuse another.
        suite: name of the suite.
        conditions: what the numbers depend on. Keys of `comparable` must agree before two results
            are merged or compared; `details` are for the record.
        arms: drafters in the order they were measured; the baseline is in each one's speed.
        noise_floor: speedup of the baseline over itself, measured like a drafter; None if not run.
    """

    format: int
    suite: str
    conditions: "Conditions"
    arms: tuple[ArmResult, ...]
    noise_floor: Estimate | None

    def arm(self, name: str) -> ArmResult:
        """Give one drafter's result.

        Raises:
            ConfigError: no such arm, with the known ones.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ConfigError(
            f"no drafter {name!r} in evaluation {self.suite!r}; "
            f"it has: {', '.join(arm.name for arm in self.arms)}"
        )

    @property
    def num_defects(self) -> int:
        """Defects of all audits together."""
        return sum(arm.audit.num_defects for arm in self.arms if arm.audit)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the numbers depend on.

    Attributes:
        comparable: plain name -> plain value; must agree between results that are compared.
        details: for the record: versions, settings, machine, target.
    """

    comparable: dict[str, Any]
    details: dict[str, Any]


def differing_conditions(first: EvalResult, second: EvalResult) -> list[str]:
    """Name the conditions two results disagree on, with both values."""
    one, two = first.conditions.comparable, second.conditions.comparable
    return [
        f"{key}: {one.get(key)!r} against {two.get(key)!r}"
        for key in dict.fromkeys([*one, *two])
        if one.get(key) != two.get(key)
    ]


def differing_drafts(first: EvalResult, second: EvalResult) -> list[str]:
    """Name what the two drafted or accepted by, where they differ; older results tell the rule."""
    one, two = first.conditions.details, second.conditions.details
    return [
        f"{key}: {one[key]!r} against {two[key]!r}"
        for key in ("tree", "rule", "min_confidence", "fallback")
        if key in one and key in two and one[key] != two[key]
    ]


def half_width(noise: Estimate | None) -> float:
    """How far from 1 the baseline measured against itself may lie; 0 where that was not run."""
    if noise is None or noise.low is None or noise.high is None:
        return 0.0
    return max(abs(noise.high - 1), abs(1 - noise.low))


def merge(first: EvalResult, second: EvalResult) -> EvalResult:
    """Put two stages of one evaluation together; an arm of the later stage replaces the earlier.

    Raises:
        ConfigError: the two were measured under different conditions, naming them.
    """
    # the report names one way of drafting for all arms
    differing = differing_conditions(first, second) + differing_drafts(first, second)
    if first.suite != second.suite:
        differing.insert(0, f"suite: {first.suite!r} against {second.suite!r}")
    if differing:
        raise ConfigError(
            "cannot merge evaluations made under different conditions; "
            + "; ".join(differing)
            + "; run the missing drafter under the first one's conditions"
        )
    arms = {arm.name: arm for arm in first.arms}
    arms.update({arm.name: arm for arm in second.arms})
    # arms of both are judged by it: a calm stage says nothing of a disturbed one
    floors = [each.noise_floor for each in (second, first) if each.noise_floor is not None]
    noise = max(floors, key=half_width, default=None)
    return replace(second, arms=tuple(arms.values()), noise_floor=noise)


def result_to_json(result: EvalResult) -> dict[str, Any]:
    """Give plain data for summary.json."""
    return asdict(result)


def result_from_json(data: Mapping[str, Any]) -> EvalResult:
    """Read what `result_to_json` gave.

    Raises:
        CheckpointError: another format, or data that is no evaluation.
    """
    from pydantic import TypeAdapter, ValidationError

    if data.get("format") != FORMAT:
        raise CheckpointError(
            f"evaluation has format {data.get('format')!r}; this version reads {FORMAT}; "
            "evaluate again"
        )
    try:
        return TypeAdapter(EvalResult).validate_python(dict(data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"not an evaluation result: {where}: {first['msg']}") from None


def read_result(path: Path) -> EvalResult:
    """Read a summary.json.

    Raises:
        CheckpointError: missing, not JSON, or no evaluation; it names the file.
    """
    import json

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return result_from_json(data if isinstance(data, dict) else {})
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"cannot read evaluation {path}: {error}") from None
