"""Keys of conf/decode/*.yaml and conf/regenerate/*.yaml."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from draftlab.sampling import Sampling
from draftlab.settings.base import Settings

Rule = Literal["auto", "exact_match", "speculative", "sampled_verify"]


class DecodeSettings(Settings):
    """How answers are decoded.

    Attributes:
        rule: how draft tokens are accepted; all are lossless. auto takes exact_match when greedy
            and speculative otherwise.
        num_draft_tokens: K, or None for the drafter's own.
        temperature: 0 is greedy.
        top_k: None is off.
        top_p: None is off.
        min_p: None is off.
        max_new_tokens: an answer's length limit, tokens.
        batch_size: sequences decoded at once; finished ones are replaced.
        prefill_tokens: prompt tokens a target pass takes at most.
        ignore_eos: go on past end tokens, up to the limit.
        seed: root of the draws.
    """

    rule: Rule
    num_draft_tokens: PositiveInt | None
    temperature: float
    top_k: PositiveInt | None
    top_p: float | None
    min_p: float | None
    max_new_tokens: PositiveInt
    batch_size: PositiveInt
    prefill_tokens: PositiveInt
    ignore_eos: bool
    seed: NonNegativeInt

    @property
    def sampling(self) -> Sampling:
        """The law that p is computed under."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


class RegenerateSettings(Settings):
    """How the target answers training prompts.

    Attributes:
        answers_per_prompt: answers of each prompt; more than one needs a temperature above 0.
        temperature: 0 is greedy.
        top_k: None is off.
        top_p: None is off.
        min_p: None is off.
        max_new_tokens: an answer's length limit, tokens.
        batch_size: sequences decoded at once.
        prompts_per_shard: the unit that is committed whole or run again.
        capture_features: keep the hidden states the drafter needs, so that training needs no
            second target pass.
    """

    answers_per_prompt: PositiveInt
    temperature: float
    top_k: PositiveInt | None
    top_p: float | None
    min_p: float | None
    max_new_tokens: PositiveInt
    batch_size: PositiveInt
    prompts_per_shard: PositiveInt
    capture_features: bool

    @property
    def sampling(self) -> Sampling:
        """The law answers are drawn from."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)
