"""The in-training probe: the drafter's real acceptance length on validation prompts."""

from draftlab.decoding.decoder import Decoder
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import Drafter
from draftlab.targets.target import Target

_NUM_PROMPTS = 24
_MAX_NEW_TOKENS = 48
_BATCH_SIZE = 8


class AcceptanceProbe:
    """Decodes validation prompts with the drafter as it is now; `best` is chosen by the result."""

    def __init__(
        self,
        target: Target,
        validation: dict[str, list[list[int]]],
        decode: DecodeSettings,
    ) -> None:
        """Choose up to 24 prompts, in turn from every domain."""
        self._target = target
        self._decode = decode
        longest = max((len(prompts) for prompts in validation.values()), default=0)
        turns = [
            prompts[i]
            for i in range(longest)
            for prompts in validation.values()
            if i < len(prompts)
        ]
        self._prompts = turns[:_NUM_PROMPTS]

    @property
    def has_prompts(self) -> bool:
        """False when nothing was held out: then nothing can be probed."""
        return bool(self._prompts)

    def __call__(self, step: int, drafter: Drafter) -> dict[str, float]:
        """Measure the pooled acceptance length, tokens per verify step."""
        decoder = Decoder(self._target, drafter, self._decode)
        answers = decoder.generate(
            self._prompts, max_new_tokens=_MAX_NEW_TOKENS, batch_size=_BATCH_SIZE
        )
        steps = [record for answer in answers for record in answer.steps]
        emitted = sum(record.num_emitted for record in steps)
        accepted = sum(record.num_accepted for record in steps)
        drafted = sum(record.num_drafted for record in steps)
        return {
            "tau": emitted / max(1, len(steps)),
            "acceptance_rate": accepted / max(1, drafted),
        }
