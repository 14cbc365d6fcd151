"""The target answers prompts in its own words, shard by shard.

In: conversations that end with a question. Out: a `ShardStore` of answers, with the hidden states a
drafter will train on, captured in the same pass. A shard is the unit: the same prompts in the same
order with the same batch-mates, committed whole or run again, so an interrupted run and an unbroken
one leave the same bytes.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftlab.data.answers import AnswerFeatures, AnswerRecord, ShardStore
from draftlab.data.conversations import Conversation, to_prompt
from draftlab.data.template import RowProblem
from draftlab.data.unasked import count_unasked
from draftlab.decoding.decoder import Decoder
from draftlab.decoding.plain import TransformersDecoding
from draftlab.decoding.records import Generation
from draftlab.decoding.settings import DecodeSettings, RegenerateSettings
from draftlab.drafters.base import Observation
from draftlab.errors import ConfigError, DataError
from draftlab.randomness import derive_seed
from draftlab.shapes import Tensor
from draftlab.targets.asking import encode_turns
from draftlab.targets.features import FeatureRequest
from draftlab.targets.target import Target

_PREFILL_TOKENS = 512
_LEAST_ANSWER_TOKENS = 8
_MAX_LISTED = 50


@dataclass(frozen=True, slots=True)
class Question:
    """One answer to be written: a prompt, and which of its answers."""

    prompt_id: str
    domain: str
    messages: tuple[Any, ...]
    prompt_ids: list[int]
    sample_index: int


class FeatureRecorder:
    """Reads along while answers are written and keeps the hidden states of every position."""

    def __init__(self, needs: FeatureRequest) -> None:
        """Say which hidden states to keep."""
        self._needs = needs
        self._taps: dict[int, list[Tensor]] = {}
        self._final: dict[int, list[Tensor]] = {}

    @property
    def needs(self) -> FeatureRequest:
        """Hidden states to keep."""
        return self._needs

    def observe(self, prompt_indices: list[int], seen: Observation) -> None:
        """Keep a copy of each row's positions."""
        for i, (index, length) in enumerate(
            zip(prompt_indices, seen.lengths.tolist(), strict=True)
        ):
            if seen.taps is not None:
                self._taps.setdefault(index, []).append(seen.taps[i, :length].clone())
            if seen.final is not None:
                self._final.setdefault(index, []).append(seen.final[i, :length].clone())

    def take(self, index: int, length: int) -> AnswerFeatures:
        """Give and forget what was seen of one prompt, `length` positions."""
        parts = [
            torch.cat(kept.pop(index))[:length] if index in kept else None
            for kept in (self._taps, self._final)
        ]
        return AnswerFeatures(taps=parts[0], final=parts[1])


def list_questions(
    target: Target,
    conversations: Sequence[Conversation],
    settings: RegenerateSettings,
    *,
    max_tokens: int,
    template_options: dict[str, Any] | None = None,
) -> tuple[list[Question], int]:
    """Render prompts and list every answer to be written.

    Answers that a conversation already has at its end are dropped: the target gives its own.
    Conversations that cannot be asked are left out: `describe_unasked` names them.

    Args:
        target: whose template and tokenizer.
        conversations: at least one.
        settings: how many answers each.
        max_tokens: longest row a drafter trains on; a prompt that leaves no room for 8 tokens of
            answer is left out.
        template_options: further variables of the chat template.

    Returns:
        Questions in order, and how many conversations were left out as too long.

    Raises:
        DataError: nothing to answer, or prompts that the template refuses, each named.
        ConfigError: several greedy answers to one prompt would be equal.
    """
    if settings.answers_per_prompt > 1 and settings.sampling.is_greedy:
        raise ConfigError(
            f"regenerate.answers_per_prompt={settings.answers_per_prompt} at temperature 0 would "
            "write the same answer again; pass regenerate.temperature=0.7 or so"
        )
    questions, refused, too_long = [], [], 0
    for conversation in conversations:
        asked = to_prompt(conversation)
        if asked is None:
            continue
        try:
            ids = encode_turns(target, asked.messages, asked.tools, template_options)
        except RowProblem as problem:
            refused.append(f"{asked.source or asked.id}: {problem}")
            continue
        if len(ids) + _LEAST_ANSWER_TOKENS > min(max_tokens, target.spec.max_positions):
            too_long += 1
            continue
        questions += [
            Question(asked.id, asked.domain, asked.messages, ids, sample)
            for sample in range(settings.answers_per_prompt)
        ]
    if refused:
        listed = "\n".join(f"  {line}" for line in refused[:_MAX_LISTED])
        rest = f"\n  and {len(refused) - _MAX_LISTED} more" if len(refused) > _MAX_LISTED else ""
        raise DataError(
            f"the chat template of {target.spec.name} cannot ask {len(refused)} of "
            f"{len(conversations)} prompts; change them, or leave them out:\n{listed}{rest}"
        )
    if not questions:
        unasked = [f"{reason} ({n})" for reason, n in count_unasked(conversations).items()]
        raise DataError(
            f"none of {len(conversations)} conversations has a question that fits "
            f"data.max_tokens={max_tokens}; there is nothing to answer"
            + (f"; left out before: {', '.join(unasked)}" if unasked else "")
        )
    # the second answers come after all first ones: a run cut short still saw every prompt
    questions.sort(key=lambda question: question.sample_index)
    return questions, too_long


def regenerate(
    target: Target,
    questions: Sequence[Question],
    settings: RegenerateSettings,
    store: ShardStore,
    *,
    needs: FeatureRequest,
    seed: int,
    max_tokens: int,
    on_answer: Callable[[Generation], None] | None = None,
    on_shard: Callable[[int, int], bool] | None = None,
) -> None:
    """Answer what is still missing in a store.

    Args:
        target: answers greedily or as sampled by the settings.
        questions: all of them, in order; shard i holds questions i * n .. i * n + n - 1.
        settings: sampling, limits, batch, shard size.
        store: where shards go; those that are whole are kept.
        needs: hidden states to capture when settings.capture_features.
        seed: root of the draws.
        max_tokens: longest row; an answer ends there at the latest, by its own prompt's length.
        on_answer: called with each finished answer.
        on_shard: called after each shard with (shards done, shards in all); False stops early.

    Raises:
        DataError: the store was begun with other settings, prompts or another target.
    """
    size = settings.prompts_per_shard
    shards = [questions[i : i + size] for i in range(0, len(questions), size)]
    store.check_manifest(_manifest(target, questions, settings, needs, seed, max_tokens))
    missing = store.missing(len(shards))
    done = len(shards) - len(missing)
    for index in missing:
        _answer_shard(
            target, shards[index], settings, store, index, needs, seed, max_tokens, on_answer
        )
        done += 1
        if on_shard is not None and not on_shard(done, len(shards)):
            return


def _answer_shard(
    target: Target,
    questions: Sequence[Question],
    settings: RegenerateSettings,
    store: ShardStore,
    index: int,
    needs: FeatureRequest,
    seed: int,
    max_tokens: int,
    on_answer: Callable[[Generation], None] | None,
) -> None:
    plain = _decode_settings(settings, seed)
    recorder = None
    if target.speculation_refusal is not None:
        decoder = TransformersDecoding(target, plain)  # no memory of ours, so nothing to record
    else:
        recorder = FeatureRecorder(needs) if settings.capture_features else None
        decoder = Decoder(target, None, plain, listener=recorder)
    # each answer has the room its own prompt leaves, whatever its shard-mates leave: what the
    # shortest prompt allows is decoded, and longer rows are cut below
    shortest = min(len(question.prompt_ids) for question in questions)
    generations = decoder.generate(
        [question.prompt_ids for question in questions],
        max_new_tokens=min(settings.max_new_tokens, max_tokens - shortest),
        row_keys=[derive_seed("answer", q.prompt_id, q.sample_index) for q in questions],
        on_finish=on_answer,
    )
    records = [
        _record(question, generation, max_tokens - len(question.prompt_ids))
        for question, generation in zip(questions, generations, strict=True)
    ]
    features = None
    if recorder is not None:
        # the last token of an answer was never run through the target: one position less
        features = [recorder.take(i, r.num_tokens - 1) for i, r in enumerate(records)]
    store.write(index, records, features, features_dtype=settings.features_dtype)


def _record(question: Question, generation: Generation, room: int) -> AnswerRecord:
    is_cut = len(generation.output_ids) > room
    return AnswerRecord(
        prompt_id=question.prompt_id,
        domain=question.domain,
        messages=question.messages,
        prompt_ids=tuple(question.prompt_ids),
        answer_ids=generation.output_ids[:room],
        finish="eos" if generation.finish == "eos" and not is_cut else "length",
        sample_index=question.sample_index,
    )


def _decode_settings(settings: RegenerateSettings, seed: int) -> DecodeSettings:
    return DecodeSettings(
        rule="auto",
        lossy=False,
        lossy_epsilon=None,
        lossy_delta=None,
        lossy_threshold=None,
        num_draft_tokens=None,
        tree=None,
        min_confidence=None,
        fallback=False,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logit_bias=None,
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=0,
        stop=[],
        batch_size=settings.batch_size,
        prefill_tokens=_PREFILL_TOKENS,
        graphs="auto",
        ignore_eos=False,
        seed=seed,
    )


def _manifest(
    target: Target,
    questions: Sequence[Question],
    settings: RegenerateSettings,
    needs: FeatureRequest,
    seed: int,
    max_tokens: int,
) -> dict[str, Any]:
    asked = [[q.prompt_id, q.sample_index, q.prompt_ids] for q in questions]
    template = target.tokenizer.chat_template
    return {
        "target_checksum": target.spec.checksum,
        "tokenizer_sha256": target.spec.tokenizer_sha256,
        "template_sha256": hashlib.sha256(json.dumps(template).encode()).hexdigest(),
        "prompts_sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        "settings": settings.model_dump(mode="json"),
        "features": asdict(needs) if settings.capture_features else None,
        "dtype": target.spec.dtype,
        "max_tokens": max_tokens,
        "seed": seed,
    }
