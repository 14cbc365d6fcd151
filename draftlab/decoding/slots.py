"""One sequence on its way through the decoder: what the host knows of it."""

from dataclasses import dataclass, field

from draftlab.decoding.records import Finish, Generation, StepRecord
from draftlab.decoding.stops import AnswerText, StopStrings
from draftlab.sampling import Sampling


@dataclass(slots=True)
class Sequence:
    """A row in flight.

    The invariant of every round: the target's KV covers positions 0..base-1, and `anchor`, the
    newest token, sits at position base with its KV not yet written.

    Attributes:
        prompt_index: place in the list of prompts.
        prompt_ids: the prompt.
        text_ids: what the target decodes from: the prompt, or a start token where an encoder has
            read the prompt.
        limit: tokens the answer may have.
        sampling: how this row is sampled.
        stops: strings that end the answer, or None.
        key: names this row's randomness, whatever its batch-mates.
        slot: which KV row it lives in.
        entered_s: clock reading when it entered its slot.
        base: committed length, tokens.
        anchor: newest token.
        output_ids: the answer so far.
        rounds: verify steps so far, for keys of randomness.
    """

    prompt_index: int
    prompt_ids: list[int]
    limit: int
    sampling: Sampling
    key: int
    stops: StopStrings | None = None
    text_ids: list[int] = field(default_factory=list)
    slot: int = -1
    entered_s: float = 0.0
    base: int = 0
    anchor: int = -1
    output_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    rounds: int = 0
    first_token_at: float = 0.0
    finish: Finish | None = None
    _text: AnswerText | None = None

    @property
    def is_fresh(self) -> bool:
        """True until the first token is out: that pass carries no drafts and is prefill."""
        return not self.output_ids

    @property
    def may_draft(self) -> int:
        """Draft tokens that can still enter the answer: the next token takes one place itself."""
        return 0 if self.is_fresh else max(0, self.limit - len(self.output_ids) - 1)

    def emit(self, tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
        """Append tokens up to an end token, a stop string or the limit, and note the finish.

        Returns:
            The tokens that were kept; those after the cut are gone.
        """
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            if token in eos_ids:
                self.finish = "eos"
                break
            if len(self.output_ids) + len(kept) == self.limit:
                self.finish = "length"
                break
        if self.stops is not None:
            kept = self._stop(self.stops, kept)
        self.output_ids.extend(kept)
        return kept

    def _stop(self, stops: StopStrings, tokens: list[int]) -> list[int]:
        if self._text is None:
            self._text = stops.open()
        count = stops.feed(self._text, tokens)
        if count is None:
            return tokens
        self.finish = "stop"
        return tokens[:count]

    def as_generation(self, now: float, *, is_lossy: bool) -> Generation:
        """Freeze a finished sequence."""
        assert self.finish is not None
        text = None
        if self.stops is not None and self._text is not None:
            text = self.stops.close(self._text)
        return Generation(
            prompt_index=self.prompt_index,
            prompt_ids=tuple(self.prompt_ids),
            output_ids=tuple(self.output_ids),
            finish=self.finish,
            steps=tuple(self.steps),
            first_token_s=self.first_token_at - self.entered_s,
            decode_s=now - self.first_token_at,
            is_lossy=is_lossy,
            text=text,
        )
