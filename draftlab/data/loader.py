"""A data set read, rendered, checked, counted and cached: everything before the first step.

In: `DataSettings` and the target's tokenizer. Out: `Prepared`: samples, held-out samples and a
report that says what became of every row. Read first: `prepare`.

The cache is keyed by what the rows depend on (content of the files, tokenizer, template, settings),
never by names, sizes or times (case O-11).
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from draftlab.data.chat import check_template, choose_turns, encode_chat
from draftlab.data.conversations import (
    Conversation,
    Reading,
    describe_bad_lines,
    list_files,
    read_files,
    read_hub,
    to_prompt,
)
from draftlab.data.packing import Sample, cut_samples
from draftlab.data.prompts import load_prompts
from draftlab.data.settings import DataSettings
from draftlab.data.template import (
    RowProblem,
    compute_tokenizer_fingerprint,
    find_answer_marker,
    load_template,
)
from draftlab.data.unasked import UNASKED_ADVICE, explain_unasked
from draftlab.errors import DataError
from draftlab.files import compute_file_sha256, write_whole
from draftlab.randomness import derive_seed

log = logging.getLogger(__name__)

_FORMAT = 2  # raise it whenever equal inputs give other rows
_MAX_EXAMPLES = 50
_SHOWN_EXAMPLES = 5
_READ = "that the target reads"


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows. Counts in chats, samples and tokens.

    Attributes:
        num_chats: chats read (bad lines not among them).
        num_samples: samples to train on.
        num_held_out: samples held out for validation.
        num_tokens: tokens of both.
        num_learned: answer tokens of both, that is, tokens with loss.
        num_cut: samples cut at max_tokens.
        max_tokens: that limit.
        is_targets_limit: data.max_tokens is higher, but the target reads no more.
        turns: each or last, as asked for.
        num_split_chats: chats whose answers have rows of their own, since the template rewrites
            history.
        dropped: chats (or samples) without a token to learn, by reason.
        dropped_examples: the first 50 of them, "file:line (id): reason".
        left_out: answers that carry no loss in chats that were kept, by reason.
        bad_lines: lines skipped on request, "file:line: reason".
        domains: samples, tokens and learned tokens by domain.
        from_cache: the rows were prepared by an earlier call.
    """

    num_chats: int = 0
    num_samples: int = 0
    num_held_out: int = 0
    num_tokens: int = 0
    num_learned: int = 0
    num_cut: int = 0
    max_tokens: int = 0
    is_targets_limit: bool = False
    turns: str = "each"
    num_split_chats: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_examples: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)
    bad_lines: tuple[str, ...] = ()
    domains: dict[str, dict[str, int]] = field(default_factory=dict)
    from_cache: bool = False

    def describe(self) -> str:
        """Say it in a few lines."""
        lines = [
            f"{self.num_chats} chats gave {self.num_samples} samples to train on and "
            f"{self.num_held_out} held out: {self.num_tokens} tokens, {self.num_learned} learned"
            + (" (from the cache)" if self.from_cache else "")
        ]
        if self.num_cut:
            why = ", the most that the target reads" if self.is_targets_limit else ""
            lines.append(f"{self.num_cut} samples were cut at {self.max_tokens} tokens{why}")
        if self.num_split_chats:
            lines.append(
                f"{self.num_split_chats} chats have one row an answer: "
                "the template rewrites history"
            )
        lines += [f"dropped {count}: {reason}" for reason, count in self.dropped.items()]
        lines += [f"  {example}" for example in self.dropped_examples[:_SHOWN_EXAMPLES]]
        lines += [f"not learned, {count} answers: {why}" for why, count in self.left_out.items()]
        if self.bad_lines:
            lines.append(f"skipped {len(self.bad_lines)} bad lines:")
            lines.append(describe_bad_lines(self.bad_lines))
        lines += [
            f"domain {name}: {counts['samples']} samples, {counts['learned']} learned tokens"
            for name, counts in self.domains.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Samples ready for packing.

    Attributes:
        samples: to train on.
        held_out: for validation; disjoint from `samples` in chats.
        report: what became of every row.
    """

    samples: list[Sample]
    held_out: list[Sample]
    report: DataReport


def read_split(
    settings: DataSettings,
    split: Literal["train", "validation", "evaluation"],
    cache_dir: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Reading:
    """Read the conversations of one split, as text.

    Own files and hub data sets are split in train and validation by each chat's id; the shipped
    prompts have all three splits.

    Args:
        settings: what to read.
        split: which part.
        cache_dir: folder for files of the `datasets` library.
        tokenizer: lets rows of rendered `text` in; None refuses them.

    Raises:
        DataError: files missing, lines bad, turns of weight 0 where all are learned, or a split
            this kind of data does not have.
    """
    if settings.kind == "builtin":
        return Reading(load_prompts(split)[: settings.max_samples], [])
    if split == "evaluation":
        raise DataError(
            f"data of kind {settings.kind} has a train and a validation part, but evaluation was "
            "asked for; evaluate on data=builtin, or give the file as data of its own"
        )
    find_opening = None
    if tokenizer is not None:
        find_opening = cache(partial(_find_opening, settings, tokenizer))
    reading = _read_all(settings, cache_dir, find_opening)
    train, held_out = _split(settings, reading.conversations)
    return replace(reading, conversations=held_out if split == "validation" else train)


def read_training_chats(
    settings: DataSettings,
    cache_dir: Path,
    find_tokenizer: Callable[[], PreTrainedTokenizerBase | None],
) -> Reading:
    """Read what is to be learned, or answered and learned, as text, before the target is here.

    Args:
        settings: what to read.
        cache_dir: folder for files of the `datasets` library.
        find_tokenizer: gives the target's; asked only where a row is rendered `text`. Where it
            gives None such rows count as chats, and `prepare` finds out.

    Raises:
        DataError: as for `read_split`, or nothing could be learned whatever the target says.
    """
    if settings.kind == "builtin":
        return read_split(settings, "train", cache_dir)
    find_tokenizer = cache(find_tokenizer)

    @cache
    def find_opening() -> str | None:
        tokenizer = find_tokenizer()
        if tokenizer is None:
            return ""  # every text holds it
        if settings.answers == "given":
            check_template(tokenizer, settings.template_options)
        return _find_opening(settings, tokenizer)

    reading = _read_all(settings, cache_dir, find_opening)
    chats, held_out = _split(settings, reading.conversations)
    if not chats:
        if held_out and settings.answers == "target":
            raise DataError(
                f"data.validation_fraction={settings.validation_fraction:g} holds out all "
                f"{len(held_out)} chats of {_name_source(settings)}; lower it"
            )
        chats = held_out  # `prepare` trains on a handful of chats all the same
    dropped: Counter[str] = Counter()
    examples: list[str] = []
    for chat in chats:
        reason = _find_no_use(settings, chat, find_tokenizer)
        if reason is None:
            return replace(reading, conversations=chats)
        dropped[reason] += 1
        examples.append(f"{chat.source} ({chat.id}): {reason}")
    raise DataError(_explain_nothing(settings, chats, dropped, examples))


def prepare(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    vocab_size: int,
    *,
    max_positions: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Turn conversations into samples, or take them from the cache.

    Args:
        settings: what to read and how.
        tokenizer: the target's.
        cache_dir: folder for prepared rows and for the `datasets` library.
        vocab_size: V, embedding rows of the target.
        max_positions: most tokens the target reads, where longer samples are cut as well; None
            for no such limit.
        on_progress: called with chats done and chats in all.

    Raises:
        DataError: shipped prompts (they have no answers), bad lines, turns of weight 0 where all
            are learned, a template that cannot be split, no token to learn at all, or ids the
            target has no row for. Nothing heavy was done by then.
    """
    if settings.kind == "builtin":
        # a few of them hold earlier turns of ours, which the target never said
        raise DataError(
            "the shipped prompts (data.kind=builtin) hold no answers of the target; pass "
            "data.answers=target, and it answers them first"
        )
    check_template(tokenizer, settings.template_options)
    find_opening = cache(partial(_find_opening, settings, tokenizer))
    reading = None if settings.kind == "jsonl" else _read_all(settings, cache_dir, find_opening)
    limit = min(settings.max_tokens, max_positions or settings.max_tokens)
    key = _compute_key(settings, tokenizer, reading, limit)
    path = cache_dir / f"prepared-{key[:24]}.safetensors"
    if path.is_file():
        prepared = _load(path)
        log.info("prepared rows taken from %s", path)
    else:
        reading = reading or _read_all(settings, cache_dir, find_opening)
        prepared = _encode_all(settings, tokenizer, reading, limit, on_progress)
        _save(path, prepared)
    _check_ids([*prepared.samples, *prepared.held_out], tokenizer, vocab_size)
    return prepared


def _find_opening(settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Find what tells chats that the template has rendered from other text."""
    marker = find_answer_marker(tokenizer, settings.template_options)
    return None if marker is None else marker[0]


def _split(
    settings: DataSettings, chats: list[Conversation]
) -> tuple[list[Conversation], list[Conversation]]:
    """Give the chats to train on, and those held out."""
    train, held_out = [], []
    for chat in chats:
        (held_out if _is_held_out(settings, chat) else train).append(chat)
    return train, held_out


def _read_all(
    settings: DataSettings, cache_dir: Path, find_opening: Callable[[], str | None] | None
) -> Reading:
    read = (
        partial(read_files, settings.paths)
        if settings.kind == "jsonl"
        else partial(
            read_hub, str(settings.hub_name), subset=settings.hub_subset, split=settings.hub_split
        )
    )
    reading = read(
        domain=settings.domain,
        on_bad_line=settings.on_bad_line,
        cache_dir=cache_dir,
        messages_field=settings.messages_field,
        find_opening=find_opening,
    )
    reading = replace(reading, conversations=reading.conversations[: settings.max_samples])
    if settings.learn == "all":
        _refuse_weights(settings, reading.conversations)
    return reading


def _refuse_weights(settings: DataSettings, chats: list[Conversation]) -> None:
    """Refuse turns of weight 0 where all are learned: rows do not tell them from other text."""
    learned = chats if settings.answers == "given" else filter(None, map(to_prompt, chats))
    found = [
        f"\n  {chat.source} ({chat.id}): turn {turn}"
        for chat in learned
        for turn, message in enumerate(chat.messages, start=1)
        if message.get("weight") == 0
    ]
    if found:
        raise DataError(
            f"data.learn=all would learn turns of weight 0 ({len(found)}), which are not to be "
            f"learned:{''.join(found[:_SHOWN_EXAMPLES])}\n"
            "pass data.learn=answers, or leave these chats out"
        )


def _compute_key(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading | None,
    limit: int,
) -> str:
    if reading is None:
        content: Any = [
            (path.name, compute_file_sha256(path)) for path in list_files(settings.paths)
        ]
    else:
        content = [asdict(chat) for chat in reading.conversations]
    parts = {
        "format": _FORMAT,
        "content": content,
        # files are told by content, so a moved file is still the same data
        "settings": settings.model_dump(exclude={"paths"}, mode="json"),
        "limit": limit,
        "tokenizer": compute_tokenizer_fingerprint(tokenizer),
        "template": load_template(tokenizer),
        "tool_template": load_template(tokenizer, [{}]),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _encode_all(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    reading: Reading,
    limit: int,
    on_progress: Callable[[int, int], None] | None,
) -> Prepared:
    chats = reading.conversations
    samples: list[Sample] = []
    owners: list[Conversation] = []
    dropped: Counter[str] = Counter()
    examples: list[str] = []
    left_out: Counter[str] = Counter()
    num_split = 0

    def drop(chat: Conversation, reason: str) -> None:
        dropped[reason] += 1
        if len(examples) < _MAX_EXAMPLES:
            examples.append(f"{chat.source} ({chat.id}): {reason}")

    for done, chat in enumerate(chats, start=1):
        try:
            encoded = encode_chat(
                tokenizer, chat, turns=settings.turns, options=settings.template_options
            )
        except RowProblem as problem:
            drop(chat, str(problem))
        else:
            left_out.update(encoded.left_out)
            num_split += encoded.was_split
            for row in encoded.rows:
                ids, mask = torch.tensor(row.ids), torch.tensor(row.mask)
                samples.append(Sample(len(samples), chat.domain, ids, mask))
                owners.append(chat)
        if on_progress:
            on_progress(done, len(chats))
    cut = cut_samples(samples, limit)
    is_targets = limit < settings.max_tokens
    limit_name = f"the {limit} tokens {_READ}" if is_targets else f"max_tokens={limit}"
    for sample in cut.lost:
        drop(owners[sample.sample_id], f"the answer lies beyond {limit_name}")
    if not cut.samples:
        raise DataError(_explain_nothing(settings, chats, dropped, examples))
    held_out = [s for s in cut.samples if _is_held_out(settings, owners[s.sample_id])]
    if len(held_out) == len(cut.samples):
        held_out = []  # a handful of chats: training comes first
    away = {sample.sample_id for sample in held_out}
    train = [sample for sample in cut.samples if sample.sample_id not in away]
    report = DataReport(
        num_chats=len(chats),
        num_samples=len(train),
        num_held_out=len(held_out),
        num_tokens=sum(len(sample) for sample in cut.samples),
        num_learned=sum(sample.num_learned for sample in cut.samples),
        num_cut=cut.num_cut,
        max_tokens=limit,
        is_targets_limit=is_targets,
        turns=settings.turns,
        num_split_chats=num_split,
        dropped=dict(dropped),
        dropped_examples=tuple(examples),
        left_out=dict(left_out),
        bad_lines=tuple(str(line) for line in reading.bad_lines),
        domains=count_domains(cut.samples),
    )
    return Prepared(train, held_out, report)


def count_domains(samples: list[Sample]) -> dict[str, dict[str, int]]:
    """Count samples, tokens and learned tokens by domain, in order of first appearance."""
    domains: dict[str, dict[str, int]] = {}
    for sample in samples:
        counts = domains.setdefault(sample.domain, {"samples": 0, "tokens": 0, "learned": 0})
        counts["samples"] += 1
        counts["tokens"] += len(sample)
        counts["learned"] += sample.num_learned
    return domains


def _is_held_out(settings: DataSettings, chat: Conversation) -> bool:
    # by id, so that adding rows moves no chat from one side to the other
    return derive_seed("validation", chat.id) / 2**63 < settings.validation_fraction


def _explain_nothing(
    settings: DataSettings, chats: list[Conversation], dropped: Counter[str], examples: list[str]
) -> str:
    where = _name_source(settings)
    if not chats:
        return (
            f"no token to learn: {where} holds no chat; expected a JSON object a line, such as "
            '{"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    reasons = ", ".join(f"{reason} ({count})" for reason, count in dropped.most_common())
    shown = "".join(f"\n  {example}" for example in examples[:_SHOWN_EXAMPLES])
    num_texts = sum(chat.text is not None for chat in chats)
    if settings.answers == "target":
        advice = ", and ".join(UNASKED_ADVICE[reason] for reason in dropped)
    elif any("max_tokens" in reason for reason in dropped):
        advice = "raise data.max_tokens"
    elif any(_READ in reason for reason in dropped):
        advice = "give shorter chats, or train for a target that reads more"
    elif num_texts == len(chats):
        advice = (
            "give text with an answer in it, or give the rows as `messages` or `prompt` and pass "
            "data.answers=target: the target then answers the prompts itself"
        )
    else:
        advice = (
            "give chats with an assistant's answer, or pass data.answers=target: the target then "
            "answers the prompts itself"
        )
        if num_texts:
            advice += "; it cannot answer rendered text: give that as `messages` or `prompt`"
    return f"no token to learn in {len(chats)} chats of {where}: {reasons}{shown}\n{advice}"


def _find_no_use(
    settings: DataSettings,
    chat: Conversation,
    find_tokenizer: Callable[[], PreTrainedTokenizerBase | None],
) -> str | None:
    """Tell why a chat teaches nothing, without rendering it; None where it may teach something."""
    if settings.answers == "target":
        return explain_unasked(chat)
    try:
        if chat.text is None:
            choose_turns(chat.messages, settings.turns)
        elif (tokenizer := find_tokenizer()) is not None:
            encode_chat(tokenizer, chat, turns=settings.turns, options=settings.template_options)
    except RowProblem as problem:
        return str(problem)
    return None


def _name_source(settings: DataSettings) -> str:
    return ", ".join(settings.paths) or str(settings.hub_name)


def _check_ids(samples: list[Sample], tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    for sample in samples:
        highest = int(sample.ids.max())
        if highest >= vocab_size:
            token = tokenizer.convert_ids_to_tokens(highest)
            raise DataError(
                f"token id {highest} ({token!r}) stands in the data, but the target has "
                f"{vocab_size} embedding rows (ids 0..{vocab_size - 1}); use the target's own "
                "tokenizer, without tokens added to it"
            )


def _save(path: Path, prepared: Prepared) -> None:
    samples = sorted([*prepared.samples, *prepared.held_out], key=lambda s: s.sample_id)
    away = {sample.sample_id for sample in prepared.held_out}
    tensors = {
        "ids": torch.cat([sample.ids for sample in samples]),
        "mask": torch.cat([sample.mask for sample in samples]),
        "lengths": torch.tensor([len(sample) for sample in samples]),
        "sample_ids": torch.tensor([sample.sample_id for sample in samples]),
        "held_out": torch.tensor([sample.sample_id in away for sample in samples]),
    }
    metadata = {
        "report": json.dumps(asdict(prepared.report)),
        "domains": json.dumps([sample.domain for sample in samples]),
    }
    write_whole(path, lambda temporary: save_file(tensors, temporary, metadata))


def _load(path: Path) -> Prepared:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    lengths = tensors["lengths"].tolist()
    samples = [
        Sample(sample_id, domain, ids, mask)
        for sample_id, domain, ids, mask in zip(
            tensors["sample_ids"].tolist(),
            json.loads(metadata["domains"]),
            tensors["ids"].split(lengths),
            tensors["mask"].split(lengths),
            strict=True,
        )
    ]
    away = tensors["held_out"].tolist()
    data = json.loads(metadata["report"])
    for name in ("dropped_examples", "bad_lines"):
        data[name] = tuple(data[name])
    report = replace(DataReport(**data), from_cache=True)
    return Prepared(
        [sample for sample, out in zip(samples, away, strict=True) if not out],
        [sample for sample, out in zip(samples, away, strict=True) if out],
        report,
    )
