"""What a verify step costs on this machine, so that a probe can tell tokens a second.

Training changes how many draft tokens are accepted, not what a step takes. So the clock is read
once, and all probes of a run are judged by the same costs, resumed or not.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from draftlab.decoding.records import StepRecord
from draftlab.evaluation.speed import Answers
from draftlab.runs.run_dir import write_json

_PROMPTS = 2
_NEW_TOKENS = 24
_WARM_UP_TOKENS = 6


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a verify step at batch 1: drafting, the target's pass, and bookkeeping.

    Attributes:
        num_draft_tokens: K, the longest chain; None where drafts have a length of their own (trees,
            chains that confidence cuts).
        shortest_s: a step with one draft token.
        longest_s: a step with K of them, or with drafts as they are.
    """

    num_draft_tokens: int | None
    shortest_s: float
    longest_s: float

    def tokens_per_s(self, steps: Sequence[StepRecord]) -> float:
        """Model the tokens a second at the draft length that suits these steps best.

        The first k tokens of a chain do not depend on how many follow, so one run tells the
        acceptance length of every shorter chain; the costs in between lie on a line.
        """
        if not steps:
            return 0.0
        longest = self.num_draft_tokens
        if longest is None:
            return _tau(steps, max(step.num_drafted for step in steps)) / self.longest_s
        rise = (self.longest_s - self.shortest_s) / max(1, longest - 1)
        return max(
            _tau(steps, k) / (self.shortest_s + rise * (k - 1)) for k in range(1, longest + 1)
        )


def measure_costs(
    decoder_at: Callable[[int | None], Answers],
    prompts: Sequence[Sequence[int]],
    num_draft_tokens: int | None,
) -> StepCosts:
    """Time verify steps at the shortest and the longest draft.

    Args:
        decoder_at: gives a decoder that drafts so many tokens; None is as the settings say.
        prompts: two are enough.
        num_draft_tokens: K, or None where drafts have a length of their own.
    """
    longest = _step_s(decoder_at(num_draft_tokens), prompts)
    is_chain = num_draft_tokens is not None and num_draft_tokens > 1
    shortest = _step_s(decoder_at(1), prompts) if is_chain else longest
    # the clock of a busy machine may claim that less work takes longer
    return StepCosts(num_draft_tokens, min(shortest, longest), longest)


def read_costs(path: Path) -> StepCosts | None:
    """Read what an earlier process of this run measured; None when none did."""
    return StepCosts(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def write_costs(path: Path, costs: StepCosts) -> None:
    """Keep costs for the rest of the run."""
    write_json(path, asdict(costs))


def _step_s(decoder: Answers, prompts: Sequence[Sequence[int]]) -> float:
    decoder.generate(prompts[:1], max_new_tokens=_WARM_UP_TOKENS, batch_size=1)
    answers = [
        answer
        for prompt in prompts[:_PROMPTS]
        for answer in decoder.generate([prompt], max_new_tokens=_NEW_TOKENS, batch_size=1)
    ]
    steps = [step for answer in answers for step in answer.steps]
    seconds = [step.draft_s + step.verify_s + step.commit_s for step in steps]
    return max(1e-9, median(seconds)) if seconds else 1e-9


def _tau(steps: Sequence[StepRecord], k: int) -> float:
    return 1 + sum(min(step.num_accepted, k) for step in steps) / len(steps)
