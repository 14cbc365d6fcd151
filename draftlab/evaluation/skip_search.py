"""Which layers a target skips best when it drafts for itself: a search by tokens a second.

In: a target and calibration prompts. Out: a `SkipSearch`, best choice first. Read
search_skip_layers; how one choice is measured stands in SkipMeter.

Starts are spread over what the field does (every second or third inner layer, a block in the
middle, an early exit); from the best of them the search walks: one layer more or less, then one
layer for another, whatever is faster by more than the clock's noise. Every choice is measured once.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.self_speculative import SelfSpeculative, SelfSpeculativeSettings
from draftlab.errors import ConfigError
from draftlab.targets.target import Target

METHOD = (
    "tokens a second = tokens per verify step over all steps / median seconds of a step, batch 1"
)
_MARGIN = 1.01  # a choice less than 1 % faster than another is not told from it


@dataclass(frozen=True, slots=True)
class SkipTrial:
    """One choice of layers, measured.

    Attributes:
        skip_layers: ascending, 0-based.
        tau: tokens per verify step.
        step_s: median seconds of a verify step, the draft included.
    """

    skip_layers: tuple[int, ...]
    tau: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """What is searched for."""
        return self.tau / self.step_s


@dataclass(frozen=True, slots=True)
class SkipSearch:
    """What was found.

    Attributes:
        trials: every choice that was measured, the fastest first.
        plain_tokens_per_s: of the target without a drafter, measured the same way.
        is_settled: no neighbour of the best choice is faster; False when trials ran out before.
    """

    trials: tuple[SkipTrial, ...]
    plain_tokens_per_s: float
    is_settled: bool

    @property
    def best(self) -> SkipTrial:
        """The fastest choice."""
        return self.trials[0]


@runtime_checkable
class MeasuresSkips(Protocol):
    """What times a choice of layers."""

    num_layers: int

    def measure(self, skip_layers: tuple[int, ...]) -> SkipTrial:
        """Time one choice."""
        ...

    def measure_plain(self) -> float:
        """Time the target alone, tokens a second."""
        ...


class SkipMeter:
    """Measures choices with the decoder, on the same prompts every time."""

    def __init__(
        self,
        target: Target,
        drafter: SelfSpeculativeSettings,
        decode: DecodeSettings,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
    ) -> None:
        """Choose what all measurements share.

        Args:
            target: drafts for itself.
            drafter: its K counts, where `decode` has none.
            decode: rule and sampling; one prompt at a time whatever it says.
            prompts: calibration prompts, never those of an evaluation.
            max_new_tokens: limit of each answer.

        Raises:
            ConfigError: no prompt, or answers too short to time.
        """
        if not prompts or max_new_tokens < 3:
            raise ConfigError(
                f"{len(prompts)} prompts of {max_new_tokens} tokens each cannot time a choice of "
                "layers; expected at least one prompt and 3 tokens"
            )
        self.num_layers = target.spec.num_layers
        self._target = target
        self._drafter = drafter
        self._decode = decode
        self._prompts = prompts
        self._limit = max_new_tokens

    def measure(self, skip_layers: tuple[int, ...]) -> SkipTrial:
        """Decode every prompt with one choice of layers."""
        drafter = self.build(skip_layers)
        tau, step_s = self._run(Decoder(self._target, drafter, self._decode))
        return SkipTrial(skip_layers, tau, step_s)

    def measure_plain(self) -> float:
        """Decode every prompt without a drafter; give tokens a second."""
        tau, step_s = self._run(Decoder(self._target, None, self._decode))
        return tau / step_s

    def build(self, skip_layers: tuple[int, ...]) -> SelfSpeculative:
        """Build the drafter of a choice."""
        settings = self._drafter.model_copy(update={"skip_layers": skip_layers, "exit_layer": None})
        return SelfSpeculative(settings, self._target.view).to(self._target.dtype).eval()

    def _run(self, decoder: Decoder) -> tuple[float, float]:
        # the first answer also warms up; the median step is not moved by that
        answers = decoder.generate(self._prompts, max_new_tokens=self._limit, batch_size=1)
        steps = [step for answer in answers for step in answer.steps]
        if not steps:
            raise ConfigError(
                "every answer ended with its first token; choose other prompts, or pass "
                "decode.ignore_eos=true"
            )
        seconds = statistics.median(s.draft_s + s.verify_s + s.commit_s for s in steps)
        return sum(s.num_emitted for s in steps) / len(steps), seconds


def search_skip_layers(
    meter: MeasuresSkips,
    *,
    max_trials: int,
    seed: int,
    earlier: Sequence[SkipTrial] = (),
    on_trial: Callable[[SkipTrial], None] | None = None,
) -> SkipSearch:
    """Search the layers whose skipping makes self-speculation fastest.

    Args:
        meter: measures a choice.
        max_trials: choices to measure, those of `earlier` included.
        seed: of the order in which neighbours are tried.
        earlier: trials of an interrupted search with the same seed: the search goes the same way
            and measures only what is missing.
        on_trial: called with every new trial.

    Raises:
        ConfigError: a target of one layer, or no trial allowed.
    """
    if meter.num_layers < 2 or max_trials < 1:
        raise ConfigError(
            f"{max_trials} trials on a target of {meter.num_layers} layers: expected at least one "
            "trial and two layers"
        )
    known = {trial.skip_layers: trial for trial in earlier}
    tried: dict[tuple[int, ...], SkipTrial] = {}

    def measure(choice: tuple[int, ...]) -> SkipTrial:
        trial = known.get(choice)
        if trial is None:
            trial = meter.measure(choice)
            if on_trial is not None:
                on_trial(trial)
        tried[choice] = trial
        return trial

    plain = meter.measure_plain()
    for choice in starting_choices(meter.num_layers):
        if len(tried) < max_trials:
            measure(choice)
    best = max(tried.values(), key=lambda trial: trial.tokens_per_s)
    order = torch.Generator().manual_seed(seed)
    is_settled = False
    while not is_settled and len(tried) < max_trials:
        is_settled = True
        for choice in _neighbours(best.skip_layers, meter.num_layers, order):
            if choice in tried:
                continue
            if len(tried) == max_trials:
                is_settled = False
                break
            trial = measure(choice)
            if trial.tokens_per_s > _MARGIN * best.tokens_per_s:
                best, is_settled = trial, False
                break
    ranked = sorted(tried.values(), key=lambda trial: -trial.tokens_per_s)
    return SkipSearch(tuple(ranked), plain, is_settled)


def starting_choices(num_layers: int) -> list[tuple[int, ...]]:
    """List choices to start from, each once: every one keeps the first layer and skips another."""
    inner, quarter = range(1, num_layers - 1), max(1, num_layers // 4)
    choices = [
        tuple(inner[::2]),
        tuple(inner[1::3]),
        tuple(range(quarter, num_layers - quarter)),
        *(tuple(range(depth * quarter, num_layers)) for depth in (3, 2, 1)),
    ]
    return [choice for choice in dict.fromkeys(choices) if choice and choice[0] > 0]


def _neighbours(
    choice: tuple[int, ...], num_layers: int, order: torch.Generator
) -> Iterator[tuple[int, ...]]:
    """Give choices one layer away, then those with one layer for another, shuffled each."""
    skipped = set(choice)
    toggles = [skipped ^ {layer} for layer in range(num_layers)]
    kept = [layer for layer in range(num_layers) if layer not in skipped]
    swaps = [skipped - {out} | {into} for out, into in itertools.product(choice, kept)]
    for group in (toggles, swaps):
        for place in torch.randperm(len(group), generator=order).tolist():
            if 0 < len(group[place]) < num_layers:
                yield tuple(sorted(group[place]))
