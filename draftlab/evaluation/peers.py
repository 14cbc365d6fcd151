"""transformers' own decoding as arms of the same measurement.

In: a target. Out: things that answer prompts like a `Decoder`, through `generate` of the very model
in memory, so that draftlab's figures stand beside a baseline everyone has.
"""

from collections.abc import Sequence
from typing import Any

import torch

from draftlab.decoding.records import Generation, StepRecord
from draftlab.decoding.timing import DeviceClock
from draftlab.targets.target import Target


class TransformersDecoding:
    """Greedy `generate` of transformers at batch 1, with prompt lookup when asked."""

    def __init__(self, target: Target, *, prompt_lookup: int | None = None) -> None:
        """Choose the target, and how many tokens prompt lookup copies; None is plain decoding."""
        self._target = target
        self._clock = DeviceClock(target.device)
        self._extra = {} if prompt_lookup is None else {"prompt_lookup_num_tokens": prompt_lookup}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        row_keys: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Answer prompts one by one; times cover the whole call, for `generate` tells no more."""
        del batch_size, row_keys
        self._target.reference.detach()
        try:
            return [self._answer(list(prompt), max_new_tokens or 128) for prompt in prompts]
        finally:
            self._target.reference.attach()

    def _answer(self, prompt: list[int], max_new_tokens: int) -> Generation:
        model: Any = self._target.model
        eos_ids = self._target.spec.eos_ids
        ids = torch.tensor([prompt], device=self._target.device)
        began = self._clock.read()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(eos_ids),
                pad_token_id=eos_ids[0],
                **self._extra,
            )
        spent = self._clock.read() - began
        answer = out[0, len(prompt) :].tolist()
        rest = StepRecord(0, 0, len(answer) - 1, (), 0.0, spent, 0.0, 1)
        return Generation(
            prompt_index=0,
            prompt_ids=tuple(prompt),
            output_ids=tuple(answer),
            finish="eos" if answer[-1] in eos_ids else "length",
            steps=(rest,) if len(answer) > 1 else (),
            first_token_s=0.0,
            decode_s=spent,
        )
