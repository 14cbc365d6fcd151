"""How tokens are sampled: one law, or one a row of a batch. Data only; probabilities.py applies it.

Read `Sampling` first. `SamplingRows` is the same for rows that differ, as small tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftlab.errors import ConfigError
from draftlab.shapes import Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target is sampled. The defaults are greedy decoding with everything off.

    Applied in this order: logit bias, repetition, frequency, presence penalty, the ban on end
    tokens, temperature, top-k, top-p, min-p. That is the order of transformers; vLLM cuts by min-p
    before top-k and top-p, which differs where several of them are on.

    Attributes:
        temperature: 0 takes the largest logit (after bias, penalties and ban).
        top_k: keep the k largest logits and all that tie with the k-th; None is off.
        top_p: keep the likeliest ids until their mass reaches this; None is off.
        min_p: keep ids at least this many times as likely as the likeliest; None is off.
        repetition_penalty: divides positive and multiplies other logits of every id that stands in
            the prompt or the answer; 1 is off, above 1 discourages.
        frequency_penalty: taken off a logit for every time its id stands in the answer; 0 is off.
        presence_penalty: taken off the logit of every id that stands in the answer; 0 is off.
        logit_bias: pairs of id and what is added to its logit; -inf bans it.
        min_new_tokens: tokens an answer has before an end token may come. Stop strings are not
            held back by it.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse values that name no law, or that cannot take effect."""
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}: expected 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: expected 1 or more, or null")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0.0 < value <= 1.0:
                raise ConfigError(f"{name}={value}: expected a number in (0, 1], or null")
        cuts = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        told = ", ".join(f"{name}={value}" for name, value in cuts.items() if value is not None)
        if self.is_greedy and told:
            raise ConfigError(
                f"{told} cannot take effect at temperature 0, which is greedy; pass a temperature "
                "above 0, or null"
            )
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty}: expected a number above 0; 1 is off"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)}: expected a number; 0 is off")
        if self.min_new_tokens < 0:
            raise ConfigError(f"min_new_tokens={self.min_new_tokens}: expected 0 or more")
        _check_bias(self.logit_bias)

    @property
    def is_greedy(self) -> bool:
        """True when the law is a point mass on the largest logit."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """True when earlier tokens change the logits."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    @property
    def reads_context(self) -> bool:
        """True when the law depends on which tokens came before, or on how many."""
        return self.penalises or self.min_new_tokens > 0

    @property
    def context_free(self) -> "Sampling":
        """The same law without what reads the context: for drafters, which keep no counts."""
        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, logit_bias=self.logit_bias
        )

    @property
    def drafting(self) -> "Sampling":
        """What a drafter with a vocabulary of its own draws at: the temperature alone."""
        return Sampling(self.temperature)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse ids that the target does not have.

        Raises:
            ConfigError: a biased id at or past `vocab_size`.
        """
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise ConfigError(
                    f"logit_bias names id {token}, but the target has {vocab_size} ids; "
                    f"expected 0..{vocab_size - 1}"
                )


def _check_bias(logit_bias: tuple[tuple[int, float], ...]) -> None:
    ids = [token for token, _ in logit_bias]
    if any(token < 0 for token in ids) or len(set(ids)) != len(ids):
        raise ConfigError(f"logit_bias ids {ids}: expected ids from 0 on, each at most once")
    for token, value in logit_bias:
        if math.isnan(value) or value == math.inf:
            raise ConfigError(
                f"logit_bias of id {token} is {value}: expected a number, or -inf to ban it"
            )


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of a batch that use a setting, and their values of it.

    Attributes:
        rows: their indices, ascending; None when all rows use it.
        values: one line a row; numbers of the setting, or padded ids.
        largest: of the first value of all rows, so that nobody has to ask the device.
        ids: ids that the values belong to, for a logit bias.
    """

    rows: Int[Tensor, " r"] | None
    values: Float[Tensor, "r n"]
    largest: float
    ids: Int[Tensor, "r n"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """Laws of the rows of a batch, which may differ; built once, while the same rows stay.

    A row's law is what its `Sampling` alone gives, bit for bit, whatever its batch-mates are.
    A part is None when no row uses that setting.

    Attributes:
        laws: one a row.
        temperature: of each row, 0 where it is greedy.
        divisors: what logits are divided by, 1 where a row is greedy; None when all are 1.
        greedy: rows at temperature 0.
        bias: rows with a logit bias.
        penalties: rows with a repetition, frequency or presence penalty, in this order.
        min_new_tokens: rows that may not end yet.
        top_k: rows with this filter; likewise `top_p`, `min_p`.
    """

    laws: tuple[Sampling, ...]
    temperature: Float[Tensor, " R"]
    divisors: Float[Tensor, " R"] | None
    greedy: Part | None
    bias: Part | None
    penalties: Part | None
    min_new_tokens: Part | None
    top_k: Part | None
    top_p: Part | None
    min_p: Part | None

    @classmethod
    def of(cls, laws: Sequence[Sampling], device: torch.device) -> "SamplingRows":
        """Build the tensors of several laws.

        Args:
            laws: one a row, at least one.
            device: where the logits are.
        """

        def part(
            uses: Callable[[Sampling], bool], *values: Callable[[Sampling], float]
        ) -> Part | None:
            return _part(
                laws, uses, [[float(value(law)) for value in values] for law in laws], device
            )

        # not an inference tensor, for laws are kept and may meet logits that need a gradient
        with torch.inference_mode(False):
            temperature = torch.tensor([law.temperature for law in laws], dtype=torch.float64)
            divisors = None
            if any(law.temperature not in (0.0, 1.0) for law in laws):
                divisors = torch.where(temperature > 0, temperature, 1.0).to(device)
            return cls(
                laws=tuple(laws),
                temperature=temperature.to(device),
                divisors=divisors,
                greedy=part(lambda law: law.is_greedy, lambda law: law.temperature),
                bias=_bias_part(laws, device),
                penalties=part(
                    lambda law: law.penalises,
                    lambda law: law.repetition_penalty,
                    lambda law: law.frequency_penalty,
                    lambda law: law.presence_penalty,
                ),
                min_new_tokens=part(
                    lambda law: law.min_new_tokens > 0, lambda law: law.min_new_tokens
                ),
                top_k=part(lambda law: law.top_k is not None, lambda law: law.top_k or 0),
                top_p=part(lambda law: (law.top_p or 1.0) < 1.0, lambda law: law.top_p or 1.0),
                min_p=part(lambda law: law.min_p is not None, lambda law: law.min_p or 0.0),
            )

    @property
    def is_greedy(self) -> bool:
        """True when every row is greedy."""
        return all(law.is_greedy for law in self.laws)

    @property
    def reads_context(self) -> bool:
        """True when any row's law depends on the tokens before."""
        return self.penalties is not None or self.min_new_tokens is not None

    @property
    def adjusts(self) -> bool:
        """True when any row's logits change before the temperature does its part."""
        return self.bias is not None or self.reads_context

    @property
    def context_free(self) -> "SamplingRows":
        """The same laws without what reads the context."""
        return SamplingRows.of([law.context_free for law in self.laws], self.temperature.device)

    @property
    def drafting(self) -> "SamplingRows":
        """What a drafter with a vocabulary of its own draws at: the temperatures alone."""
        return SamplingRows.of([law.drafting for law in self.laws], self.temperature.device)

    def select(self, index: Sequence[int]) -> "SamplingRows":
        """Take some rows, in the order given; a row may be taken more than once."""
        return SamplingRows.of([self.laws[i] for i in index], self.temperature.device)


def _part(
    laws: Sequence[Sampling],
    uses: Callable[[Sampling], bool],
    lines: list[list[float]],
    device: torch.device,
) -> Part | None:
    rows = [i for i, law in enumerate(laws) if uses(law)]
    if not rows:
        return None
    chosen = [lines[i] for i in rows]
    values = torch.tensor(chosen, dtype=torch.float64, device=device)
    return Part(_index(rows, len(laws), device), values, max(line[0] for line in chosen))


def _bias_part(laws: Sequence[Sampling], device: torch.device) -> Part | None:
    rows = [i for i, law in enumerate(laws) if law.logit_bias]
    if not rows:
        return None
    width = max(len(laws[i].logit_bias) for i in rows)
    # padding adds 0 to id 0, which changes nothing
    pairs = [[*laws[i].logit_bias, *[(0, 0.0)] * (width - len(laws[i].logit_bias))] for i in rows]
    values = [[value for _, value in line] for line in pairs]
    ids = [[token for token, _ in line] for line in pairs]
    return Part(
        _index(rows, len(laws), device),
        torch.tensor(values, dtype=torch.float64, device=device),
        max(line[0] for line in values),
        torch.tensor(ids, dtype=torch.int64, device=device),
    )


def _index(rows: list[int], count: int, device: torch.device) -> Tensor | None:
    if len(rows) == count:
        return None
    return torch.tensor(rows, dtype=torch.int64, device=device)
