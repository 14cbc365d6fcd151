"""What `draftlab audit` found, as plain frozen data with a JSON form. No torch here.

Read AuditReport first.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from draftlab.evaluation.results import AuditVerdict
from draftlab.evaluation.two_sample import FeatureTest


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How much there was to judge: an audit without drafts proves nothing about a rule.

    Attributes:
        num_drafted: draft tokens verified.
        num_accepted: of them accepted.
    """

    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class GreedyPart:
    """Greedy answers with drafts, and plain ones at two batch widths.

    Attributes:
        verdict: of the answers with drafts, compared with plain decoding at batch 1.
        noise: of plain decoding at another batch width, by the same measure.
        noise_width: that width.
        drafts: what was drafted.
    """

    verdict: AuditVerdict
    noise: AuditVerdict
    noise_width: int
    drafts: DraftCounts

    @property
    def passes(self) -> bool:
        """True when no token is a defect."""
        return self.verdict.is_lossless


def forks_per_thousand(verdict: AuditVerdict) -> float:
    """Count tokens that are not the narrow pass's own first choice, for every 1,000 tokens."""
    return 1000 * (1 - verdict.num_exact / max(1, verdict.num_positions))


@dataclass(frozen=True, slots=True)
class SeedFork:
    """Where two answers drawn by one seed part.

    Attributes:
        prompt: index of the prompt.
        position: place in the output.
        plain_id: what plain sampling drew; -1 where its answer had ended.
        drafted_id: what came out with drafts; -1 where that answer had ended.
        distance: how far the place's random number lies from the interval of the drafted token,
            in probability, by the narrow pass.
        is_tie: the distance is within what wide passes move probabilities.
    """

    prompt: int
    position: int
    plain_id: int
    drafted_id: int
    distance: float
    is_tie: bool


@dataclass(frozen=True, slots=True)
class SeedCheck:
    """Sampled answers with and without drafts, drawn by one seed: rule=sampled_verify alone.

    Attributes:
        num_answers: pairs compared.
        num_identical: of them equal token for token.
        num_tokens: tokens of the plain answers.
        tolerance: largest distance that counts as a numerical tie, in probability.
        forks: every pair that is not equal.
    """

    num_answers: int
    num_identical: int
    num_tokens: int
    tolerance: float
    forks: tuple[SeedFork, ...]

    @property
    def passes(self) -> bool:
        """True when every difference is a numerical tie."""
        return all(fork.is_tie for fork in self.forks)


@dataclass(frozen=True, slots=True)
class SampledPart:
    """Sampled answers, many to a prompt, with and without drafts.

    Attributes:
        rule: the acceptance rule that ran.
        is_lossy: the rule does not keep the target's law, whatever the tests say.
        sampling: how the target was sampled, in words.
        num_prompts: prompts.
        num_draws: answers of each arm.
        num_tokens: tokens of the drafted arm.
        drafts: what was drafted.
        alpha: chance of a false alarm over all tests.
        tests: one a feature.
        mean_tv: mean total variation between the law of a pass one token wide and of one as wide
            as verification, on the same prefixes.
        worst_tv: the largest of them.
        num_compared: places compared for the two.
        same_seed: for rule=sampled_verify.
    """

    rule: str
    is_lossy: bool
    sampling: str
    num_prompts: int
    num_draws: int
    num_tokens: int
    drafts: DraftCounts
    alpha: float
    tests: tuple[FeatureTest, ...]
    mean_tv: float
    worst_tv: float
    num_compared: int
    same_seed: SeedCheck | None

    @property
    def differs(self) -> bool:
        """True when some test found a difference."""
        return any(test.differs for test in self.tests)

    @property
    def passes(self) -> bool:
        """True when the rule is exact and nothing speaks against it."""
        is_same = self.same_seed is None or self.same_seed.passes
        return is_same and not self.is_lossy and not self.differs


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The whole audit of one drafter on one target.

    Attributes:
        drafter: its kind.
        num_draft_tokens: K, or levels of a tree.
        greedy: at temperature 0.
        sampled: above it; None where only greedy decoding was asked for.
        conditions: target, dtype, kernels, machine, versions, settings.
    """

    drafter: str
    num_draft_tokens: int
    greedy: GreedyPart
    sampled: SampledPart | None
    conditions: dict[str, Any]

    @property
    def passes(self) -> bool:
        """True when both parts pass."""
        return self.greedy.passes and (self.sampled is None or self.sampled.passes)


def report_to_json(report: AuditReport) -> dict[str, Any]:
    """Give plain data for audit.json; numbers that JSON has no word for become text."""
    return _plain({"passes": report.passes, **asdict(report)})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_odd else value
