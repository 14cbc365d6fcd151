"""The in-training probe: the drafter's real acceptance length on validation prompts."""

from pathlib import Path
from typing import Any

import torch

from draftlab.cli.probe_costs import StepCosts, measure_costs, read_costs, write_costs
from draftlab.data.packing import Sample, collate, pack
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.records import Generation
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import Drafter
from draftlab.targets.target import Target

_NUM_PROMPTS = 24
_MAX_NEW_TOKENS = 48
_BATCH_SIZE = 8


class AcceptanceProbe:
    """Decodes validation prompts with the drafter as it is now; `best` is chosen by the result.

    A drafter that counts how often each of its choices is right (`measure_ranks`) does so here, on
    the target's answers to prompts that are not trained on.
    """

    def __init__(
        self,
        target: Target,
        validation: dict[str, list[list[int]]],
        decode: DecodeSettings,
        costs_path: Path,
    ) -> None:
        """Choose up to 24 prompts, in turn from every domain.

        Args:
            target: decoded with.
            validation: prompts by domain.
            decode: how.
            costs_path: where the costs of a step are kept for the whole run.
        """
        self._target = target
        self._decode = decode
        self._costs_path = costs_path
        longest = max((len(prompts) for prompts in validation.values()), default=0)
        turns = [
            prompts[i]
            for i in range(longest)
            for prompts in validation.values()
            if i < len(prompts)
        ]
        self._prompts = turns[:_NUM_PROMPTS]

    @property
    def num_prompts(self) -> int:
        """How many prompts are decoded; 0 when nothing was held out: then nothing can be probed."""
        return len(self._prompts)

    def __call__(self, step: int, drafter: Drafter) -> dict[str, float]:
        """Measure pooled acceptance length and model the tokens a second that it promises."""
        decoder = Decoder(self._target, drafter, self._decode)
        answers = decoder.generate(
            self._prompts, max_new_tokens=_MAX_NEW_TOKENS, batch_size=_BATCH_SIZE
        )
        self._count_ranks(drafter, answers)
        steps = [record for answer in answers for record in answer.steps]
        emitted = sum(record.num_emitted for record in steps)
        accepted = sum(record.num_accepted for record in steps)
        drafted = sum(record.num_drafted for record in steps)
        return {
            "tau": emitted / max(1, len(steps)),
            "acceptance_rate": accepted / max(1, drafted),
            "tokens_per_s": self._find_costs(drafter).tokens_per_s(steps),
        }

    def _find_costs(self, drafter: Drafter) -> StepCosts:
        costs = read_costs(self._costs_path)
        if costs is None:
            decode = self._decode
            has_own_length = decode.tree is not None or decode.min_confidence is not None
            longest = decode.num_draft_tokens or drafter.settings.num_draft_tokens

            def decoder_at(length: int | None) -> Decoder:
                update: dict[str, Any] = {} if length is None else {"num_draft_tokens": length}
                return Decoder(self._target, drafter, decode.model_copy(update=update))

            costs = measure_costs(decoder_at, self._prompts, None if has_own_length else longest)
            write_costs(self._costs_path, costs)
        return costs

    def _count_ranks(self, drafter: Drafter, answers: list[Generation]) -> None:
        measure: Any = getattr(drafter, "measure_ranks", None)
        samples = [_sample(answer) for answer in answers if answer.output_ids]
        if measure is None or not samples:
            return
        rows = pack(samples, max(len(sample) for sample in samples))
        device = self._target.drafter_view.device
        batches = (collate([row]).to(device) for row in rows)
        measure(
            (batch, self._target.read_features(batch, drafter.needs).to(device))
            for batch in batches
        )


def _sample(answer: Generation) -> Sample:
    ids = torch.tensor((*answer.prompt_ids, *answer.output_ids))
    return Sample(
        sample_id=answer.prompt_index,
        domain="validation",
        ids=ids,
        mask=torch.arange(len(ids)) >= len(answer.prompt_ids),
    )
