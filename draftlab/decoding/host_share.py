"""How much of a round is neither target nor drafter: the decoder's own time.

In: a decoder and prompts. Out: a `HostShare`. Batch 1, where that time weighs most.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.timing import DeviceClock


@dataclass(frozen=True, slots=True)
class HostShare:
    """Seconds of rounds, summed.

    Attributes:
        num_rounds: verify steps measured.
        round_s: the rounds.
        target_s: of them, the target's passes.
        drafter_s: of them, the drafter's proposals and observations.
    """

    num_rounds: int
    round_s: float
    target_s: float
    drafter_s: float

    @property
    def host_s(self) -> float:
        """Seconds outside target and drafter."""
        return self.round_s - self.target_s - self.drafter_s

    @property
    def share(self) -> float:
        """Part of the rounds outside target and drafter, 0..1."""
        return self.host_s / self.round_s if self.round_s else 0.0


class _Stopwatch:
    """Sums the seconds that some methods of an object take, while it is worn."""

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.spent_s = 0.0

    @contextmanager
    def worn_by(self, owner: object, names: Sequence[str]) -> Iterator[None]:
        """Time these methods for a while."""
        before = {name: vars(owner)[name] for name in names if name in vars(owner)}
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(owner, name)
            for name, own in before.items():
                setattr(owner, name, own)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._clock.read()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent_s += self._clock.read() - began

        return timed


def measure_host_share(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64
) -> HostShare:
    """Decode prompts one by one and split the time of their verify steps.

    Prefill and the pass that gives the first token are left out. The first prompt is decoded once
    before, to warm up.

    Args:
        decoder: as it will be used; its parts are wrapped while this runs.
        prompts: token ids, at least one prompt.
        max_new_tokens: limit of each answer.
    """
    decoder.generate(prompts[:1], max_new_tokens=max_new_tokens, batch_size=1)
    target, drafter = _Stopwatch(decoder.clock), _Stopwatch(decoder.clock)
    num_rounds, round_s, target_s, drafter_s = 0, 0.0, 0.0, 0.0
    begun: list[float] = []

    def note(_: int, tokens: list[int], accepted: int) -> None:
        # called at the end of every round; what the first one took is prefill
        if not begun:
            begun.extend([target.spent_s, drafter.spent_s])

    with ExitStack() as stack:
        stack.enter_context(target.worn_by(decoder.target, ["run"]))
        if decoder.drafter is not None:
            stack.enter_context(drafter.worn_by(decoder.drafter, ["propose", "observe"]))
        for prompt in prompts:
            target.spent_s = drafter.spent_s = 0.0
            begun.clear()
            (answer,) = decoder.generate(
                [prompt], max_new_tokens=max_new_tokens, batch_size=1, on_tokens=note
            )
            num_rounds += len(answer.steps)
            round_s += answer.decode_s
            target_s += target.spent_s - begun[0]
            drafter_s += drafter.spent_s - begun[1]
    return HostShare(num_rounds, round_s, target_s, drafter_s)
