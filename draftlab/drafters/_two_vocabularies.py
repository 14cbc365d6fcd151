"""Between the vocabularies of a target and a draft model: which tokens they share, what a text is.

In: target ids of a growing sequence. Out: the same text in draft ids, a pure function of the
sequence so far, however it arrives. Read `Bridge`, then `Retelling.extend`.

A text is cut into pieces at places that the target ids alone decide, and each piece is tokenised by
itself: only the last, open one has to be done again when tokens come in.
"""

from dataclasses import dataclass, field
from typing import Any

from draftlab.drafters._token_bytes import TokenBytes, read_token_bytes

# a piece is closed before the first word past this many tokens, or at the latest past that many
_PIECE, _LONGEST_PIECE = 24, 96
_WHITE = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class Bridge:
    """Two vocabularies and the tokens they share.

    Attributes:
        target: the target's.
        draft: the draft model's.
        target_ids: ids of shared tokens, ascending.
        draft_ids: the draft's id of each.
        draft_special: target's special id -> draft's, for those that are shared.
        is_same: the draft knows every target token by the same id.
    """

    target: TokenBytes
    draft: TokenBytes
    target_ids: list[int]
    draft_ids: list[int]
    draft_special: dict[int, int]
    is_same: bool

    @property
    def coverage(self) -> float:
        """Share of the smaller vocabulary that is shared, 0..1."""
        smaller = min(len(t.pieces) + len(t.special) for t in (self.target, self.draft))
        return len(self.target_ids) / smaller

    def back(self, drafts: list[int], tail: list[int]) -> list[int]:
        """Tokenise a drafted text the target's way, up to a special token the target lacks.

        Args:
            drafts: draft ids.
            tail: target ids just before them, ordinary ones: where the whole, tokenised together,
                begins with them, that is how the target would go on.
        """
        out: list[int] = []
        target_special = {d: t for t, d in self.draft_special.items()}
        run: list[int] = []
        for draft in [*drafts, None]:
            if draft is not None and draft not in self.draft.special:
                run.append(draft)
                continue
            if run:
                said = self.draft.bytes_of(run)
                whole = self.target.encode(self.target.bytes_of(tail) + said)
                fits = whole[: len(tail)] == tail
                out += whole[len(tail) :] if fits else self.target.encode(said)
            if draft not in target_special:
                break
            out.append(target_special[draft])
            run, tail = [], []
        unknown = (i for i, t in enumerate(out) if self._is_foreign(t))
        return out[: next(unknown, len(out))]

    def _is_foreign(self, token: int) -> bool:
        return token in self.target.special and token not in self.draft_special


def build_bridge(target_tokenizer: Any, draft_tokenizer: Any, names: tuple[str, str]) -> Bridge:
    """Find the tokens two vocabularies share.

    Ordinary tokens are shared when they say the same bytes. Special tokens are never matched with
    ordinary ones: they are shared when both spell them alike, or both begin or end texts with them.

    Args:
        target_tokenizer: the target's.
        draft_tokenizer: the draft model's.
        names: what to call the two in messages.

    Raises:
        ConfigError: a tokenizer that cannot be read.
    """
    target = read_token_bytes(target_tokenizer, whose=names[0])
    draft = read_token_bytes(draft_tokenizer, whose=names[1])
    theirs = draft_tokenizer.get_vocab()
    mine = target_tokenizer.get_vocab()
    if all(theirs.get(token) == index for token, index in mine.items()):
        ids = sorted(mine.values())
        return Bridge(target, draft, ids, ids, {i: i for i in target.special}, is_same=True)
    draft_of_text = {text: index for index, text in draft.special.items()}
    special = {
        i: draft_of_text[text] for i, text in target.special.items() if text in draft_of_text
    }
    for role in ("eos", "bos"):
        here, there = target.roles.get(role), draft.roles.get(role)
        if here is None or there is None or here in special or there in special.values():
            continue
        special[here] = there
    here, there = target.id_of_bytes(), draft.id_of_bytes()
    pairs = sorted([*special.items(), *((i, there[b]) for b, i in here.items() if b in there)])
    return Bridge(target, draft, [t for t, _ in pairs], [d for _, d in pairs], special, False)


@dataclass(slots=True)
class Retelling:
    """One sequence of target ids, told in draft ids.

    Attributes:
        bridge: between the vocabularies.
        ids: draft ids of everything so far.
        stable: of them, how many no later token can change.
        open: target ids of the piece that is still open, ordinary ones.
    """

    bridge: Bridge
    ids: list[int] = field(default_factory=list)
    stable: int = 0
    open: list[int] = field(default_factory=list)
    _has_text: bool = False

    def extend(self, tokens: list[int]) -> None:
        """Go on with the sequence; the open piece is told anew."""
        bridge = self.bridge
        if bridge.is_same:
            self.ids.extend(tokens)
            self.stable = len(self.ids)
            return
        del self.ids[self.stable :]
        if not self.ids and not self.open:
            self.ids.extend(bridge.draft.opening)
            self.stable = len(self.ids)
            if tokens and self.ids and bridge.draft_special.get(tokens[0]) == self.ids[-1]:
                tokens = tokens[1:]  # the sequence begins with its own
        for token in tokens:
            if token in bridge.target.special:
                self._close()
                self.ids.extend(self._special(token))
                self.stable = len(self.ids)
            else:
                if self._ends_before(token):
                    self._close()
                self.open.append(token)
        self.ids.extend(self._told())

    def _close(self) -> None:
        self.ids.extend(self._told())
        self.stable = len(self.ids)
        self._has_text |= bool(self.open)
        self.open = []

    def _ends_before(self, token: int) -> bool:
        """Cut where every tokenizer cuts: between a word and the space before the next one."""
        count, pieces = len(self.open), self.bridge.target.pieces
        if count < _PIECE:
            return False
        here, before = pieces.get(token, b""), pieces.get(self.open[-1], b"")
        begins_word = here[:1] == b" " and here[1:2].strip(_WHITE) != b""
        return count >= _LONGEST_PIECE or (begins_word and before[-1:].strip(_WHITE) != b"")

    def _told(self) -> list[int]:
        bridge = self.bridge
        data = bridge.target.bytes_of(self.open)
        if not self._has_text:
            if bridge.target.opens_with_space:
                data = data.removeprefix(b" ")
            if bridge.draft.opens_with_space and data:
                data = b" " + data
        return bridge.draft.encode(data)

    def _special(self, token: int) -> list[int]:
        if token in self.bridge.draft_special:
            return [self.bridge.draft_special[token]]
        if token in self.bridge.target.silent:
            return []
        return self.bridge.draft.encode(self.bridge.target.special[token].encode())
