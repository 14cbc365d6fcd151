"""Answers through transformers' own `generate`: no memory of ours, no drafts, one at a time.

For targets that the gate refuses (a recurrent state cannot be rolled back), which still answer
prompts this way; and as the baseline that everyone has.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftlab.decoding.records import Generation, StepRecord
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.timing import DeviceClock
from draftlab.errors import ConfigError
from draftlab.randomness import derive_seed
from draftlab.targets.target import Target


class TransformersDecoding:
    """`generate` of the very model in memory, at batch 1, with prompt lookup when asked."""

    def __init__(
        self, target: Target, settings: DecodeSettings, *, prompt_lookup: int | None = None
    ) -> None:
        """Choose the target, the sampling, and how many tokens prompt lookup copies, if any.

        Raises:
            ConfigError: frequency or presence penalties or stop strings, which are not passed on.
        """
        law = settings.sampling
        if law.frequency_penalty or law.presence_penalty or settings.stop:
            raise ConfigError(
                f"frequency_penalty={law.frequency_penalty}, "
                f"presence_penalty={law.presence_penalty} and stop={list(settings.stop)} cannot "
                "take effect where answers come through transformers alone; pass 0, 0 and []"
            )
        self._target = target
        self._settings = settings
        self._clock = DeviceClock(target.device)
        self._extra = {} if prompt_lookup is None else {"prompt_lookup_num_tokens": prompt_lookup}

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        batch_size: int | None = None,
        on_finish: Callable[[Generation], None] | None = None,
        row_keys: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Answer prompts one by one; times cover the whole call, for `generate` tells no more.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: limit of each answer; None takes the settings'.
            batch_size: has no effect on the answers, and is 1.
            on_finish: called with each answer.
            row_keys: key of each prompt's draws; None takes its index.
        """
        del batch_size
        limit = self._settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        answers = []
        with _own_attention(self._target), torch.random.fork_rng(devices=[]):
            for index, prompt in enumerate(prompts):
                key = row_keys[index] if row_keys is not None else index
                answers.append(self._answer(index, list(prompt), limit, key))
                if on_finish is not None:
                    on_finish(answers[-1])
        return answers

    def _answer(self, index: int, prompt: list[int], limit: int, key: int) -> Generation:
        model: Any = self._target.model
        eos_ids = self._target.spec.eos_ids
        ends = [] if self._settings.ignore_eos else list(eos_ids)
        ids = torch.tensor([prompt], device=self._target.device)
        torch.manual_seed(derive_seed("plain", self._settings.seed, key))
        room = min(limit, self._target.spec.max_positions - len(prompt))
        began = self._clock.read()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                eos_token_id=ends or None,
                pad_token_id=eos_ids[0],
                **self._law(room),
                **self._extra,
            )
        spent = self._clock.read() - began
        # with an encoder, what comes back is the decoder's side, its start token first
        before = 1 if self._target.model.config.is_encoder_decoder else len(prompt)
        answer = out[0, before:].tolist()
        rest = StepRecord(0, 0, len(answer) - 1, (), 0.0, spent, 0.0, 1)
        return Generation(
            prompt_index=index,
            prompt_ids=tuple(prompt),
            output_ids=tuple(answer),
            finish="eos" if answer[-1] in ends else "length",
            steps=(rest,) if len(answer) > 1 else (),
            first_token_s=0.0,
            decode_s=spent,
        )

    def _law(self, room: int) -> dict[str, Any]:
        """Give transformers' words for the sampling; processors there run in the same order."""
        law = self._settings.sampling
        words: dict[str, Any] = {"repetition_penalty": law.repetition_penalty}
        if law.min_new_tokens:
            words["min_new_tokens"] = min(law.min_new_tokens, room)
        if law.logit_bias:
            words["sequence_bias"] = {(token,): float(value) for token, value in law.logit_bias}
        if law.is_greedy:
            return {**words, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        return {
            **words,
            "do_sample": True,
            "temperature": law.temperature,
            "top_k": law.top_k or 0,
            "top_p": law.top_p,
            "min_p": law.min_p,
        }


@contextmanager
def _own_attention(target: Target) -> Iterator[None]:
    """Give the model its own attention back for a while."""
    was_attached = target.reference.is_attached
    if was_attached:
        target.reference.detach()
    try:
        yield
    finally:
        if was_attached:
            target.reference.attach()
