"""What decoding leaves behind: one `Generation` an answer, one `StepRecord` a verify step."""

from dataclasses import dataclass
from typing import Literal

Finish = Literal["eos", "length", "stop"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One verify step of one row. Times are those of the whole batch's step, seconds.

    Attributes:
        num_drafted: draft tokens verified for this row.
        num_accepted: of them accepted, before any cut.
        num_emitted: tokens that entered the output, next token included, after EOS and length cuts.
        overlaps: sum over v of min(p, q) at each depth reached; empty when greedy, when the draft
            has branches, and when nobody asked (they cost a pass over the vocabulary).
        draft_s: the drafter's proposal.
        verify_s: the target's pass and the acceptance rule.
        commit_s: bookkeeping and the drafter's observation.
        batch_live: rows that shared this step.
    """

    num_drafted: int
    num_accepted: int
    num_emitted: int
    overlaps: tuple[float, ...]
    draft_s: float
    verify_s: float
    commit_s: float
    batch_live: int


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer and how it came about.

    Attributes:
        prompt_index: place in the list of prompts given.
        prompt_ids: the prompt.
        output_ids: the answer; an end token, if one came, is its last id.
        finish: why it ended: an end token, the limit, or a stop string.
        steps: verify steps; without a drafter, one a token. The pass that gives the first token
            carries no drafts and belongs to prefill.
        first_token_s: seconds from entering a slot to the first token (prefill).
        decode_s: seconds from the first token to the last.
        is_lossy: a rule was used that does not keep the target's law; reports must say LOSSY.
        text: what the answer says, up to the stop string if one came; None when no stop strings
            were given, for then nobody needs the text here.
    """

    prompt_index: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    finish: Finish
    steps: tuple[StepRecord, ...]
    first_token_s: float
    decode_s: float
    is_lossy: bool = False
    text: str | None = None

    @property
    def prefill_s(self) -> float:
        """Another word for `first_token_s`."""
        return self.first_token_s
