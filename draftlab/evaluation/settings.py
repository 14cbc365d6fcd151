"""Keys of conf/eval/*.yaml."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from draftlab.settings.base import Settings


class EvalSettings(Settings):
    """What a suite measures.

    Attributes:
        suite: name of the suite and of its folder.
        prompts: builtin, or a path to a JSONL file with a domain field.
        prompts_per_domain: evaluation prompts a domain at most; None takes all.
        max_new_tokens: length limit of an answer when acceptance is measured, tokens.
        batch_size: sequences decoded at once when acceptance is measured.
        speed_prompts_per_domain: prompts a domain timed at batch 1; 0 leaves speed out.
        speed_max_new_tokens: length limit of a timed answer, tokens.
        warmup_prompts: prompts every arm decodes before the clock counts, discarded.
        repeats: times each prompt is timed in each arm.
        noise_floor: on times the baseline against itself as well, one more arm.
        draft_lengths: K to choose from on validation prompts; empty keeps each drafter's own.
        draft_length_prompts: validation prompts used for that choice.
        audit: on re-scores every timed token by the target alone.
        seed: of the order of arms and of the bootstrap.
        samples: on keeps prompts and answers in generations.jsonl, for the report to show a few.
    """

    suite: str
    prompts: Literal["builtin"] | str
    prompts_per_domain: PositiveInt | None
    max_new_tokens: PositiveInt
    batch_size: PositiveInt
    speed_prompts_per_domain: NonNegativeInt
    speed_max_new_tokens: PositiveInt
    warmup_prompts: NonNegativeInt
    repeats: PositiveInt
    noise_floor: bool
    draft_lengths: tuple[PositiveInt, ...]
    draft_length_prompts: PositiveInt
    audit: bool
    seed: NonNegativeInt
    samples: bool

    @field_validator("suite")
    @classmethod
    def _check_suite(cls, suite: str) -> str:
        if not suite or not all(c.isalnum() or c in "-_." for c in suite) or suite[0] == ".":
            raise ValueError("expected letters, digits, '-', '_' and '.': it names a folder")
        return suite

    @field_validator("draft_lengths")
    @classmethod
    def _check_lengths(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if list(lengths) != sorted(set(lengths)):
            raise ValueError("expected ascending, distinct numbers, such as [1,2,4]")
        return lengths
