"""What the ids of a tokenizer stand for, as bytes, and text back to ids without additions.

Vocabularies write the same token in different ways: byte-level BPE maps every byte to a letter of
its own (a space is Ġ), sentencepiece writes a space as ▁ and rare bytes as <0xAB>, WordPiece marks
what continues a word with ##. As bytes they can be compared. Read `read_token_bytes`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from draftlab.errors import ConfigError

_SILENT = ("bos", "pad", "unk", "cls")
_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = re.compile("([\udc80-\udcff]+)")


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """A tokenizer taken apart.

    Attributes:
        pieces: bytes of every ordinary id; an id that is not here is special, or means nothing.
        special: id -> text of every special token.
        roles: id of the tokens with a part to play (bos, eos), where there are any.
        silent: special ids that are no part of what a text says (bos, pad, unk, cls).
        single: byte -> id that says this byte alone, where there is one.
        opening: ids the tokenizer puts before every text.
        opens_with_space: whether it reads a text as if a space stood before it.
        encoder: the tokenizer without anything it would add, special tokens as plain text.
    """

    pieces: dict[int, bytes]
    special: dict[int, str]
    roles: dict[str, int]
    silent: frozenset[int]
    single: dict[int, int]
    opening: tuple[int, ...]
    opens_with_space: bool
    encoder: Tokenizer

    def bytes_of(self, ids: list[int]) -> bytes:
        """Join what ordinary ids say; ids that mean nothing say nothing."""
        return b"".join(self.pieces.get(i, b"") for i in ids)

    def encode(self, data: bytes) -> list[int]:
        """Give ids for bytes; what is no whole character goes byte by byte if it can."""
        text = data.decode("utf-8", errors="surrogateescape")
        ids: list[int] = []
        for part in _BROKEN.split(text):
            if _BROKEN.match(part):
                ids += [self.single[b] for b in _bytes(part) if b in self.single]
            elif part:
                ids += self.encoder.encode(part, add_special_tokens=False).ids
        return ids

    def id_of_bytes(self) -> dict[bytes, int]:
        """Give the id that says each run of bytes: no byte token where a plain one does, lowest."""
        found: dict[bytes, int] = {}
        fallback = set(self.single.values())
        for index, piece in sorted(self.pieces.items()):
            if piece and (piece not in found or found[piece] in fallback):
                found[piece] = index
        return found


def read_token_bytes(tokenizer: Any, *, whose: str) -> TokenBytes:
    """Take a Hugging Face tokenizer apart.

    Args:
        tokenizer: one that the tokenizers library runs.
        whose: for the message, such as "target Qwen/Qwen3-8B".

    Raises:
        ConfigError: no such tokenizer, or tokens written in a way that is not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(
            f"{whose} has a {type(tokenizer).__name__}, which the tokenizers library does not run; "
            "expected a folder with tokenizer.json"
        )
    plan = json.loads(backend.to_str())
    added = tokenizer.added_tokens_decoder
    known_special = set(tokenizer.all_special_ids)
    special = {
        index: token.content
        for index, token in added.items()
        if token.special or index in known_special
    }
    style = _style_of(plan, whose)
    pieces: dict[int, bytes] = {}
    single: dict[int, int] = {}
    for token, index in tokenizer.get_vocab().items():
        if index in special:
            continue
        if index in added:
            pieces[index] = token.encode()  # added tokens are plain text in every vocabulary
            continue
        pieces[index] = _piece(token, style)
        if style == "byte-level" and len(pieces[index]) == 1:
            single[pieces[index][0]] = index
        elif style == "sentencepiece" and (match := _BYTE_TOKEN.fullmatch(token)):
            single[int(match[1], 16)] = index
    first = tokenizer("a")["input_ids"]
    opening = next((first[:i] for i, t in enumerate(first) if t not in special), [])
    roles = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    named: list[int | None] = [getattr(tokenizer, f"{n}_token_id", None) for n in _SILENT]
    opens_with_space = style == "wordpiece" or _take_out_additions(plan)
    encoder = Tokenizer.from_str(json.dumps(plan))
    encoder.encode_special_tokens = True
    return TokenBytes(
        pieces,
        special,
        {role: index for role, index in roles.items() if index is not None},
        frozenset(i for i in named if i is not None),
        single,
        tuple(opening),
        opens_with_space,
        encoder,
    )


def _style_of(plan: dict[str, Any], whose: str) -> str:
    kinds = {part["type"] for part in _parts(plan["decoder"])}
    if "ByteLevel" in kinds:
        return "byte-level"
    if "WordPiece" in kinds:
        return "wordpiece"
    spaces = [p for p in _parts(plan["decoder"]) if p.get("pattern", {}).get("String") == _SPACE]
    if "Metaspace" in kinds or spaces:
        return "sentencepiece"
    raise ConfigError(
        f"{whose} writes its tokens in a way draftlab cannot read (decoder: "
        f"{', '.join(sorted(kinds)) or 'none'}); expected byte-level BPE, "
        "sentencepiece or WordPiece"
    )


def _piece(token: str, style: str) -> bytes:
    if style == "byte-level":
        known = [_BYTE_OF_LETTER.get(letter) for letter in token]
        return token.encode() if None in known else bytes(b for b in known if b is not None)
    if style == "wordpiece":
        return token[2:].encode() if token.startswith("##") else f" {token}".encode()
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE, " ").encode()


def _take_out_additions(plan: dict[str, Any]) -> bool:
    """Change a tokenizer's plan so that it adds nothing; tell whether it put a space in front."""
    plan["post_processor"] = plan["truncation"] = plan["padding"] = None
    added_space = False
    for part in _parts(plan["pre_tokenizer"]):
        if part["type"] == "Metaspace":
            added_space |= part.get("prepend_scheme", "always") != "never"
            part["prepend_scheme"] = "never"
        elif part.get("add_prefix_space"):
            added_space = True
            part["add_prefix_space"] = False
    normalizer = plan["normalizer"]
    prepends = [part for part in _parts(normalizer) if part["type"] == "Prepend"]
    if prepends and normalizer["type"] == "Prepend":
        plan["normalizer"] = None
    elif prepends:
        for part in [normalizer, *_parts(normalizer)]:
            if "normalizers" in part:
                kept = [p for p in part["normalizers"] if p["type"] != "Prepend"]
                part["normalizers"] = kept
    return added_space or bool(prepends)


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Walk a component and what it is a sequence of."""
    if part is None:
        return
    yield part
    for name in ("decoders", "normalizers", "pretokenizers"):
        for inner in part.get(name, ()):
            yield from _parts(inner)


def _bytes(broken: str) -> bytes:
    return broken.encode("utf-8", errors="surrogateescape")


def _letters_of_bytes() -> dict[str, int]:
    """Give the byte each letter of a byte-level vocabulary stands for.

    Printable Latin-1 stands for itself; the other bytes, in order, for the letters from U+0100 on.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters_of_bytes()
