"""The demo's stage plan: what fits into the minutes given, on this machine.

In: rates measured in some 20 seconds. Out: `StagePlan`, whose numbers go into the run's settings.
Pure arithmetic: the clocks are in demo.py.
"""

from dataclasses import dataclass

from draftlab.evaluation.settings import EvalSettings

ANSWERING_SHARE = 0.42  # of what evaluation leaves; training has the rest
PLANNED_KEYS = (
    "eval.prompts_per_domain",
    "eval.max_new_tokens",
    "eval.speed_prompts_per_domain",
    "eval.speed_max_new_tokens",
    "regenerate.answers_per_prompt",
    "regenerate.max_new_tokens",
    "regenerate.prompts_per_shard",
    "regenerate.temperature",
    "regenerate.top_p",
    "train.max_minutes",
)
"""Settings that the plan decides, whatever a recipe says."""

_DOMAINS = 12
_ARMS = 3  # baseline, baseline again, drafter
_FIRST_REPORT_S = 165.0
_RESERVE_SHARE = 0.07
_RESERVE_S = 8.0
_DRAFTING_AT_BATCH = 1.6  # seconds a token with drafts over without, measured at batch 12
_LEAST_TRAINING_S = 20.0

# longest first: limit of a training answer, and how long answers then are, tokens. At equal tokens
# every prompt answered shortly teaches more than half of them at length: 768 answers of 54 tokens
# gave tau 1.46 on unseen prompts where 363 of 105 gave 1.39
_ANSWER_SIZES = ((160, 105), (128, 92), (96, 74), (64, 54), (48, 43))
_ENOUGH_PROMPTS = 384  # with so many answered, they are not shortened below the next
_SHORT_ANSWER = 64

# richest first: prompts a domain, answer tokens, timed prompts a domain, timed tokens
_EVAL_SIZES = (
    (12, 128, 4, 96),
    (12, 96, 3, 96),
    (12, 96, 2, 80),
    (12, 64, 2, 64),
    (12, 48, 2, 48),
    (12, 40, 2, 40),
    (12, 32, 2, 32),
    (12, 24, 1, 32),
    (6, 32, 1, 32),
    (3, 32, 1, 24),
    (2, 16, 1, 16),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine was measured to do, tokens per second.

    Attributes:
        single: plain decoding at batch 1.
        batched: plain decoding at the evaluation's batch.
        answering: plain decoding at the batch that answers training prompts.
    """

    single: float
    batched: float
    answering: float


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Seconds and sizes of every stage.

    Attributes:
        total_s: the time given.
        spent_s: what loading and probing took.
        eval_s: one drafter's evaluation, of two.
        answer_s: at most this long the target answers.
        train_s: optimizer steps.
        num_prompts: training prompts that will be answered in that time, if the rates hold; 0
            where answers are given.
        answers_per_prompt: answers of each.
        answer_tokens: limit of an answer.
        prompts_per_domain: evaluation prompts.
        max_new_tokens: their answers' limit.
        speed_prompts_per_domain: timed prompts.
        speed_max_new_tokens: their answers' limit.
    """

    total_s: float
    spent_s: float
    eval_s: float
    answer_s: float
    train_s: float
    num_prompts: int
    answers_per_prompt: int
    answer_tokens: int
    prompts_per_domain: int
    max_new_tokens: int
    speed_prompts_per_domain: int
    speed_max_new_tokens: int

    @property
    def prompts_per_shard(self) -> int:
        """Answers committed at once: large shards lose less time, small ones less work."""
        answers = self.num_prompts * self.answers_per_prompt
        return 128 if answers >= 512 else 64 if answers >= 192 else 32

    def describe(self) -> str:
        """Print the plan for people."""
        rows = (
            ("load and probe (done)", self.spent_s, ""),
            (
                "n-gram against the baseline, first report",
                self.eval_s,
                f"{self.prompts_per_domain} prompts a domain, "
                f"{self.speed_prompts_per_domain} of them timed",
            ),
            (
                "the target answers training prompts",
                self.answer_s,
                f"about {self.num_prompts} prompts x {self.answers_per_prompt}, "
                f"at most {self.answer_tokens} tokens",
            ),
            ("train the drafter", self.train_s, ""),
            ("it against the baseline, final report", self.eval_s, "the same prompts"),
        )
        lines = [f"plan for {self.total_s / 60:.0f} minutes:"]
        lines += [
            f"  {seconds:5.0f} s  {what}{': ' + note if note else ''}"
            for what, seconds, note in rows
            if seconds > 0
        ]
        return "\n".join(lines)


def plan_stages(total_s: float, spent_s: float, rates: Rates, num_prompts: int) -> StagePlan:
    """Share out the time: evaluation at most two fifths, answers at most two fifths of the rest.

    Args:
        total_s: the time given, seconds.
        spent_s: gone already.
        rates: of this machine.
        num_prompts: training prompts for the target to answer; 0 where answers are given.
    """
    left = max(1.0, total_s * (1 - _RESERVE_SHARE) - _RESERVE_S - spent_s)
    allowed = min(0.21 * left, 240.0)
    if total_s >= 600:
        allowed = min(allowed, max(30.0, _FIRST_REPORT_S - spent_s))
    sizes = next((s for s in _EVAL_SIZES if _eval_seconds(s, rates) <= allowed), _EVAL_SIZES[-1])
    eval_s = _eval_seconds(sizes, rates)
    rest = max(_LEAST_TRAINING_S, left - 2 * eval_s)
    allowed = ANSWERING_SHARE * rest
    rounds = {limit: num_prompts * mean / rates.answering for limit, mean in _ANSWER_SIZES}
    limit = next(
        (
            limit
            for limit, needed in rounds.items()
            if needed <= allowed
            or (limit == _SHORT_ANSWER and num_prompts * allowed / needed >= _ENOUGH_PROMPTS)
        ),
        min(rounds),
    )
    one_round_s = rounds[limit]
    answers = max(1, min(4, int(allowed / one_round_s))) if num_prompts else 1
    answer_s = min(answers * one_round_s, allowed)
    share = answer_s / (answers * one_round_s) if num_prompts else 0.0
    return StagePlan(
        total_s=total_s,
        spent_s=spent_s,
        eval_s=eval_s,
        answer_s=answer_s,
        train_s=max(_LEAST_TRAINING_S, rest - answer_s),
        num_prompts=min(num_prompts, max(_DOMAINS, round(num_prompts * share))),
        answers_per_prompt=answers,
        answer_tokens=limit,
        prompts_per_domain=sizes[0],
        max_new_tokens=sizes[1],
        speed_prompts_per_domain=sizes[2],
        speed_max_new_tokens=sizes[3],
    )


def apply_to_eval(plan: StagePlan, settings: EvalSettings) -> EvalSettings:
    """Put the plan's sizes into the evaluation's settings."""
    return settings.model_copy(
        update={
            "prompts_per_domain": plan.prompts_per_domain,
            "max_new_tokens": plan.max_new_tokens,
            "speed_prompts_per_domain": plan.speed_prompts_per_domain,
            "speed_max_new_tokens": plan.speed_max_new_tokens,
        }
    )


def _eval_seconds(sizes: tuple[int, int, int, int], rates: Rates) -> float:
    """Estimate one drafter's evaluation: drafts cost more than they give once a batch is full."""
    prompts, tokens, timed, timed_tokens = sizes
    acceptance = _DRAFTING_AT_BATCH * _DOMAINS * prompts * tokens / rates.batched
    speed = _ARMS * (_DOMAINS * timed + 3) * timed_tokens / rates.single
    audit = 2 * _DOMAINS * timed * timed_tokens / rates.batched
    choice = 12 * tokens / rates.single / 2
    return acceptance + speed + audit + choice
