"""From data settings to training samples: read, let the target answer, or take answers as given.

In: settings and a target. Out: `Collected`. The parent room of `draftlab regenerate`, `train` and
`demo`: all three find the same answers in the same place.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftlab.cli.disk import describe_bytes
from draftlab.cli.progress import Ticker
from draftlab.data.answers import ShardStore
from draftlab.data.conversations import Conversation, describe_bad_lines, to_prompt
from draftlab.data.feature_bytes import bytes_of_vector
from draftlab.data.loader import prepare, read_split
from draftlab.data.packing import Sample, cut_samples
from draftlab.data.settings import DataSettings
from draftlab.data.unasked import count_unasked, describe_unasked
from draftlab.decoding.records import Generation
from draftlab.decoding.regenerate import Question, list_questions, regenerate
from draftlab.decoding.settings import RegenerateSettings
from draftlab.errors import DataError
from draftlab.runs.paths import PathSettings
from draftlab.shapes import Int, Tensor
from draftlab.targets.asking import encode_turns
from draftlab.targets.features import FeatureRequest
from draftlab.targets.target import Target

log = logging.getLogger(__name__)

_POLL_S = 0.5
_LEAST_ANSWER_TOKENS = 32
_TIME_TOLERANCE = 1.1  # a last shard may end this much late: better than to leave its time unused


@dataclass(frozen=True, slots=True)
class Collected:
    """What a drafter trains on.

    Attributes:
        samples: token rows with their loss mask.
        captured: hidden states that the samples' feature files hold; None: computed in training.
        validation: prompts by domain that K, `best` and every threshold are chosen on.
        facts: counts for provenance and the report.
    """

    samples: list[Sample]
    captured: FeatureRequest | None
    validation: dict[str, list[list[int]]]
    facts: dict[str, Any]


def collect_samples(
    target: Target,
    data: DataSettings,
    answering: RegenerateSettings,
    paths: PathSettings,
    *,
    needs: FeatureRequest,
    seed: int,
    is_first_rank: bool = True,
    may_answer: bool = True,
    answer_s: float | None = None,
) -> Collected:
    """Read the data and, where the target is to answer it, write the answers that are missing.

    Args:
        target: whose tokenizer, template and answers.
        data: what to read; `data.answers` says whose answers are learned.
        answering: how the target answers.
        paths: where answers and caches are kept.
        needs: hidden states to capture while answering.
        seed: root of the draws.
        is_first_rank: the first process answers, others wait until all is there.
        may_answer: False takes the answers that are there, even if some are missing.
        answer_s: seconds after which no further shard is begun, and what is there is used; None
            has every prompt answered.

    Raises:
        DataError: bad lines, missing files, nothing to learn.
    """
    cache = paths.cache / "data"
    if data.answers == "given":
        prepared = prepare(
            data,
            target.tokenizer,
            cache,
            target.spec.vocab_size,
            max_positions=target.spec.max_positions,
        )
        if is_first_rank:
            log.info("%s", prepared.report.describe())
        return Collected(
            prepared.samples,
            None,
            _prompts_of(prepared.held_out),
            {"answers": "given", "data": asdict(prepared.report)},
        )
    reads_nothing = not needs.tap_layers and not needs.wants_final
    if target.speculation_refusal is not None or reads_nothing:
        # nothing is asked for, or transformers answers and shows none: training computes them
        answering = answering.model_copy(update={"capture_features": False})
    reading = read_split(data, "train", cache, target.tokenizer)
    if reading.bad_lines and is_first_rank:
        log.warning("skipped bad lines:\n%s", describe_bad_lines(reading.bad_lines))
    unasked = describe_unasked(reading.conversations)
    if unasked and is_first_rank:
        log.info("of the chats to train on:\n%s", unasked)
    questions, too_long = list_questions(
        target,
        reading.conversations,
        answering,
        max_tokens=data.max_tokens,
        template_options=data.template_options,
    )
    if too_long and is_first_rank:
        log.info(
            "%d training prompts leave no room for an answer in data.max_tokens=%d (%s reads %d): "
            "left out",
            too_long,
            data.max_tokens,
            target.spec.name,
            target.spec.max_positions,
        )
    store = ShardStore(answers_folder(target, questions, answering, paths, needs, seed, data))

    def answer_in_turn() -> None:
        if not store.missing(-(-len(questions) // answering.prompts_per_shard)):
            log.info("answers are there already: %s", store.folder)
            return  # a folder that is only read need not be writable
        with store.hold():
            _answer(target, questions, answering, store, needs, seed, data.max_tokens, answer_s)

    if may_answer:
        target.run_on_first(answer_in_turn, is_first=is_first_rank)
        if not is_first_rank:
            _wait_for(store, len(questions), answering.prompts_per_shard)
        _require_all(store, len(questions), answering.prompts_per_shard, answer_s)
    else:
        log.info("answers as an earlier run left them: %s", store.folder)
    cut = cut_samples(store.read(), data.max_tokens)
    if not cut.samples:
        raise DataError("no token to learn: the target gave no answer to any prompt")
    size = answering.prompts_per_shard
    answered = [q for i in store.list_shards() for q in questions[i * size : (i + 1) * size]]
    facts = {
        "answers": "target",
        "folder": str(store.folder),
        "num_prompts": len({q.prompt_id for q in answered}),
        "num_answers": len(cut.samples),
        "num_answer_tokens": sum(sample.num_learned for sample in cut.samples),
        "num_tokens": sum(len(sample) for sample in cut.samples),
        "prompts_left_out_as_too_long": too_long,
        "dropped": count_unasked(reading.conversations),
    }
    captured = needs if answering.capture_features else None
    held_out = read_split(data, "validation", cache, target.tokenizer).conversations
    validation = encode_prompts(target, held_out, data.template_options)
    return Collected(cut.samples, captured, validation, facts)


def encode_prompts(
    target: Target, chats: list[Conversation], template_options: Mapping[str, Any] | None = None
) -> dict[str, list[list[int]]]:
    """Render chats as prompts, by domain; an answer at their end is dropped.

    Chats that cannot be asked, and prompts that leave the target no room for a short answer, are
    left out, and counted in the log.

    Raises:
        DataError: a chat that the template cannot render.
    """
    prompts: dict[str, list[list[int]]] = {}
    too_long = 0
    if unasked := describe_unasked(chats):
        log.info("of the prompts to decode:\n%s", unasked)
    for chat in chats:
        question = to_prompt(chat)
        if question is None:
            continue
        ids = encode_turns(target, question.messages, question.tools, template_options)
        if len(ids) + _LEAST_ANSWER_TOKENS > target.spec.max_positions:
            too_long += 1
            continue
        prompts.setdefault(question.domain, []).append(ids)
    if too_long:
        log.info("%d prompts are too long for %s: left out", too_long, target.spec.name)
    return prompts


def answers_folder(
    target: Target,
    questions: list[Question],
    answering: RegenerateSettings,
    paths: PathSettings,
    needs: FeatureRequest,
    seed: int,
    data: DataSettings,
) -> Path:
    """Name the folder of these answers: equal choices meet there again, others never do."""
    asked = [[q.prompt_id, q.sample_index, q.prompt_ids] for q in questions]
    key = json.dumps(
        [
            target.spec.to_json(),
            answering.model_dump(mode="json"),
            asdict(needs) if answering.capture_features else None,
            data.max_tokens,
            seed,
            asked,
        ]
    )
    return paths.outputs / "answers" / hashlib.sha256(key.encode()).hexdigest()[:16]


def count_tokens(samples: list[Sample], vocab_size: int) -> Int[Tensor, " V"]:
    """Count tokens for choosing a draft vocabulary: what is learned four times, all else once.

    Words of a prompt come back in answers that were not seen, so they fill the places that the
    answers leave (coverage of unseen answers at 8192 ids: 96.6 % instead of 92 %).
    """
    learned = torch.bincount(
        torch.cat([sample.ids[sample.mask] for sample in samples]), minlength=vocab_size
    )
    return 4 * learned + torch.bincount(
        torch.cat([sample.ids[~sample.mask] for sample in samples]), minlength=vocab_size
    )


def _answer(
    target: Target,
    questions: list[Question],
    answering: RegenerateSettings,
    store: ShardStore,
    needs: FeatureRequest,
    seed: int,
    max_tokens: int,
    answer_s: float | None,
) -> None:
    size = answering.prompts_per_shard
    missing = store.missing(-(-len(questions) // size))
    if not missing:
        return  # who held the folder before wrote them
    if answering.capture_features and answer_s is None:
        log.info("%s", _describe_features(target, questions, answering, needs, max_tokens))
    here = sum(len(questions[i * size : (i + 1) * size]) for i in missing)
    began = time.monotonic()
    num_answers = num_tokens = 0
    total = here if answer_s is None else round(answer_s)
    with Ticker("the target answers", total, unit="" if answer_s is None else " s") as ticker:

        def count(answer: Generation) -> None:
            nonlocal num_answers, num_tokens
            num_answers += 1
            num_tokens += len(answer.output_ids)
            spent = time.monotonic() - began
            speed = f"{num_tokens / spent:.0f} tokens/s"
            if answer_s is None:
                ticker.update(num_answers, note=speed)
            else:
                ticker.update(min(total, round(spent)), note=f"{num_answers} answers, {speed}")

        regenerate(
            target,
            questions,
            answering,
            store,
            needs=needs,
            seed=seed,
            max_tokens=max_tokens,
            on_answer=count,
            on_shard=None if answer_s is None else _stop_after(answer_s),
        )


def _stop_after(seconds: float) -> Callable[[int, int], bool]:
    """Begin no shard that would, at the pace so far, end after the time given."""
    began = time.monotonic()
    num_done = 0

    def keeps_on(_done: int, _total: int) -> bool:
        nonlocal num_done
        num_done += 1
        return (time.monotonic() - began) * (num_done + 1) / num_done <= _TIME_TOLERANCE * seconds

    return keeps_on


def _describe_features(
    target: Target,
    questions: list[Question],
    answering: RegenerateSettings,
    needs: FeatureRequest,
    max_tokens: int,
) -> str:
    width, number = target.spec.hidden_size, target.dtype.itemsize
    vector = bytes_of_vector(width, answering.features_dtype, number)
    token = vector * (len(needs.tap_layers) + needs.wants_final)
    # the last token of an answer is never read by the target
    rows = [min(len(q.prompt_ids) + answering.max_new_tokens, max_tokens) - 1 for q in questions]
    return (
        f"hidden states: {token:,} bytes a token, {describe_bytes(token * sum(rows))} if every "
        "answer reaches its limit"
    )


def _wait_for(store: ShardStore, num_questions: int, size: int) -> None:
    while store.missing(-(-num_questions // size)):
        time.sleep(_POLL_S)


def _require_all(store: ShardStore, num_questions: int, size: int, answer_s: float | None) -> None:
    """Refuse to train on a part of the answers where all of them were asked for."""
    num_shards = -(-num_questions // size)
    missing = [] if answer_s is not None else store.missing(num_shards)
    if missing:
        raise DataError(
            f"{store.folder} lacks {len(missing)} of the {num_shards} shards of answers that were "
            f"just there, such as shard {missing[0]}; something else deletes or changes them: keep "
            "it from that, and give the same command again"
        )


def _prompts_of(samples: list[Sample]) -> dict[str, list[list[int]]]:
    """Cut held-out samples down to what comes before their first answer."""
    prompts: dict[str, list[list[int]]] = {}
    for sample in samples:
        first = int(sample.mask.to(torch.int8).argmax())
        if first > 0:
            prompts.setdefault(sample.domain, []).append(sample.ids[:first].tolist())
    return prompts
