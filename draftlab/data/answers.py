"""What the target answered, kept in shards that are whole or absent.

In: records (and captured hidden states) of one shard. Out: `Sample`s to train on. Read first:
`ShardStore.write` and `ShardStore.read`.

A store is a folder:
    manifest.json                what the answers depend on: target, template, sampling, prompts
    shard-00012.safetensors      captured taps and final hidden states, where they were asked for,
                                 as feature_bytes.py lays them out
    shard-00012.jsonl            a header line, then a record a line; written last: it is the commit
A shard killed half-way leaves no .jsonl, so it is missing and is run again. Whoever answers holds
the folder meanwhile: other processes that want the same answers wait, and find them there.
"""

import fcntl
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from draftlab.data.feature_bytes import FeatureDtype, lay_out_vectors
from draftlab.data.packing import Sample
from draftlab.data.records import Message
from draftlab.errors import DataError
from draftlab.files import write_atomic, write_whole
from draftlab.shapes import Float, Tensor

log = logging.getLogger(__name__)

_MAX_RECORDS = 1 << 20  # of one shard; sample ids are made of shard and place
_NAME = re.compile(r"shard-(\d{5,})\.jsonl")


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer of the target.

    Attributes:
        prompt_id: id of the conversation it answers.
        domain: domain of that.
        messages: the turns that were answered, for reading; ids are what counts.
        prompt_ids: what the target read.
        answer_ids: what it wrote, the end token included.
        finish: eos (it ended by itself) or length (it was cut).
        sample_index: which of several answers to one prompt.
    """

    prompt_id: str
    domain: str
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish: Literal["eos", "length"]
    sample_index: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True)
class AnswerFeatures:
    """Hidden states captured while one answer was written.

    T is the record's number of tokens, or one less: the last token is never read by the target.

    Attributes:
        taps: tapped layers in ascending order, or None.
        final: after the final norm, or None.
    """

    taps: Float[Tensor, "T L D"] | None
    final: Float[Tensor, "T D"] | None


class ShardStore:
    """A folder of answer shards."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; it need not exist yet."""
        self.folder = folder

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other writers out, once those who are here are done; a killed one lets go by itself.

        Where the file system knows no locks, nobody is kept out: what two write is the same, and
        a whole shard is never written again.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process writes answers to %s: waiting for it", self.folder)
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                log.info("%s cannot be locked (%s)", self.folder, error.strerror)
            yield

    def check_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, or check that this folder was begun with the same one.

        Raises:
            DataError: naming each key that differs and both values.
        """
        path = self.folder / "manifest.json"
        given = json.loads(json.dumps(manifest))  # tuples and the like as JSON shows them
        if not path.is_file():
            text = json.dumps(given, indent=1, ensure_ascii=False)
            write_atomic(path, text)
            return
        saved = _flat(json.loads(path.read_text(encoding="utf-8")))
        given = _flat(given)
        differing = [
            f"{key}: {_short(saved.get(key))} there, {_short(given.get(key))} now"
            for key in sorted({*saved, *given})
            if saved.get(key) != given.get(key)
        ]
        if differing:
            raise DataError(
                f"{self.folder} holds answers made in another way ({'; '.join(differing)}); "
                "write to another folder, or delete this one"
            )

    def list_shards(self) -> list[int]:
        """List the shards that are whole, in order."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        numbers = sorted(int(match[1]) for match in found if match)
        return [number for number in numbers if self._is_whole(number)]

    def missing(self, num_shards: int) -> list[int]:
        """List the shards 0..num_shards-1 that still have to be written, in order."""
        whole = set(self.list_shards())
        return [number for number in range(num_shards) if number not in whole]

    def write(
        self,
        index: int,
        records: Sequence[AnswerRecord],
        features: Sequence[AnswerFeatures] | None = None,
        *,
        features_dtype: FeatureDtype = "target",
    ) -> None:
        """Commit a shard as a whole; one that is whole already stays as it is.

        Args:
            index: number of the shard, 0 or more.
            records: its answers, in the order of its prompts.
            features: hidden states, one a record; None when none were captured.
            features_dtype: what they are written in.

        Raises:
            DataError: features do not belong to the records.
        """
        if len(records) >= _MAX_RECORDS:
            raise DataError(f"shard {index} has {len(records)} records, expected < {_MAX_RECORDS}")
        jsonl, tensors = self._path(index, "jsonl"), self._path(index, "safetensors")
        laid = None if features is None else _lay_out(index, records, features, features_dtype)
        if self._is_whole(index):
            return  # somebody may be reading it
        jsonl.unlink(missing_ok=True)  # from here on the shard is missing until its last rename
        if laid is None:
            tensors.unlink(missing_ok=True)
        else:
            write_whole(tensors, lambda temporary: save_file(laid, temporary))
        header = {
            "shard": index,
            "num_records": len(records),
            "features_bytes": None if laid is None else tensors.stat().st_size,
        }
        lines = [header, *(asdict(record) for record in records)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomic(jsonl, text)

    def read_records(self) -> Iterator[AnswerRecord]:
        """Read the answers of all whole shards, in order."""
        for index in self.list_shards():
            yield from self._records(index)

    def read(self) -> list[Sample]:
        """Read all whole shards as samples: the answer is learned, the prompt is not.

        A sample's id is made of its shard and its place there, so it does not depend on which
        other shards exist. Features stay in their files until `Sample.load_features`.

        Raises:
            DataError: there is no whole shard.
        """
        samples = []
        for index in self.list_shards():
            tensors = self._path(index, "safetensors")
            path = tensors if tensors.is_file() else None
            for place, record in enumerate(self._records(index)):
                mask = torch.zeros(record.num_tokens, dtype=torch.bool)
                mask[len(record.prompt_ids) :] = True
                samples.append(
                    Sample(
                        sample_id=index * _MAX_RECORDS + place,
                        domain=record.domain,
                        ids=torch.tensor((*record.prompt_ids, *record.answer_ids)),
                        mask=mask,
                        features_path=path,
                        features_slot=place if path else None,
                    )
                )
        if not samples:
            raise DataError(
                f"{self.folder} holds no finished shard of answers; run draftlab regenerate"
            )
        return samples

    def _path(self, index: int, suffix: str) -> Path:
        return self.folder / f"shard-{index:05d}.{suffix}"

    def _is_whole(self, index: int) -> bool:
        # renames are atomic, copies from elsewhere are not: count lines and bytes as well
        path, tensors = self._path(index, "jsonl"), self._path(index, "safetensors")
        try:
            data = path.read_bytes()
            header = json.loads(data.split(b"\n", 1)[0])
            expected, size = header["num_records"], header["features_bytes"]
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False
        if not data.endswith(b"\n") or data.count(b"\n") != expected + 1:
            return False
        return size is None or (tensors.is_file() and tensors.stat().st_size == size)

    def _records(self, index: int) -> Iterator[AnswerRecord]:
        with self._path(index, "jsonl").open(encoding="utf-8", newline="\n") as file:
            next(file)
            for line in file:
                data = json.loads(line)
                for name in ("messages", "prompt_ids", "answer_ids"):
                    data[name] = tuple(data[name])
                yield AnswerRecord(**data)


def _lay_out(
    index: int,
    records: Sequence[AnswerRecord],
    features: Sequence[AnswerFeatures],
    dtype: FeatureDtype,
) -> dict[str, Tensor]:
    if len(features) != len(records) or not records:
        raise DataError(
            f"shard {index} has {len(records)} records but features of {len(features)}; "
            "expected one each, and at least one"
        )
    laid: dict[str, Tensor] = {}
    for name in ("taps", "final"):
        parts = [getattr(each, name) for each in features]
        if all(part is None for part in parts):
            continue
        for record, part in zip(records, parts, strict=True):
            length = None if part is None else len(part)
            if length not in (record.num_tokens, record.num_tokens - 1):
                raise DataError(
                    f"shard {index}: {name} of prompt {record.prompt_id} has {length} rows for "
                    f"{record.num_tokens} tokens; expected as many, or one less"
                )
        laid |= lay_out_vectors(name, torch.cat(parts), dtype)
        lengths = torch.tensor([0, *(len(part) for part in parts)])
        offsets = lengths.cumsum(0)
        if "offsets" in laid and not torch.equal(laid["offsets"], offsets):
            raise DataError(f"shard {index}: taps and final differ in length")
        laid["offsets"] = offsets
    if not laid:
        raise DataError(f"shard {index}: features hold neither taps nor final; pass None instead")
    return laid


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name nested values by dotted keys, so that a difference is shown where it is."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
