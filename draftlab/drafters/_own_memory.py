"""Memory of a draft model that runs over keys and values of its own, and how it keeps up.

In: the tokens of each sequence. Out: the final hidden state after the newest one. Drafts of a round
are written behind the true tokens; what turns out otherwise is forgotten and overwritten. Read
`Text.settle`, then `feed`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import Door
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest
from draftlab.targets.step import Step

# tokens a row catches up in one pass at most; buffers are this much longer than the sequences, so
# that the padding columns of short rows have somewhere to go
CHUNK = 64
FINAL = FeatureRequest(wants_final=True)


@dataclass(slots=True)
class Text:
    """One sequence as the draft model knows it.

    Attributes:
        ids: tokens, anchor included.
        written: tokens whose keys and values lie in the buffers; drafts of the last round may
            follow the true ones.
        settled: of them, how many are known to be true.
    """

    ids: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    settled: int = 0

    def settle(self) -> None:
        """Forget written tokens that turned out otherwise; the anchor is always run again."""
        last = max(0, len(self.ids) - 1)
        self.settled = min(self.settled, last)
        while self.settled < min(last, len(self.written)):
            if self.written[self.settled] != self.ids[self.settled]:
                break
            self.settled += 1
        del self.written[self.settled :]

    def has_room(self, depth: int, longest: int) -> bool:
        """Tell whether a draft of `depth` tokens stays within the model's longest sequence."""
        return bool(self.ids) and len(self.ids) + depth - 1 <= longest


@dataclass(slots=True)
class OwnMemory:
    """Sequences, their keys and values, and the weights laid out for decoding.

    Attributes:
        texts: by slot.
        kv: the model's own.
        door: the fastest way through the layers that serves this model.
        head: final hidden states to logits.
        longest: sequence the model takes, tokens.
        begin: called with the slots whose sequences begin, before any token of them is run; None
            where there is nothing to do.
    """

    texts: list[Text]
    kv: KVBuffers
    door: Door
    head: Callable[[Tensor], Tensor]
    longest: int
    begin: Callable[[list[int]], None] | None = None

    def run(self, step: Step) -> Float[Tensor, "R T D"]:
        """Run new tokens and give their final hidden states."""
        final = self.door.forward(self.kv, step, FINAL, False).features.final
        assert final is not None, "asked for, so given"
        return final

    def feed(self, slots: list[int], pieces: list[list[int]]) -> Float[Tensor, "R D"]:
        """Run the next tokens of some rows; give the final hidden state of each row's last one."""
        device = self.kv.data.device
        width = max(len(piece) for piece in pieces)
        bases = [len(self.texts[slot].written) for slot in slots]
        step = Step(
            rows=torch.tensor(slots, device=device),
            ids=torch.tensor([p + [0] * (width - len(p)) for p in pieces], device=device),
            base=torch.tensor(bases, device=device),
            live=max(bases) + width,
        )
        final = self.run(step)
        for slot, piece in zip(slots, pieces, strict=True):
            text = self.texts[slot]
            text.written.extend(piece)
            text.settled = len(text.written)
        last = torch.tensor([len(piece) - 1 for piece in pieces], device=device)
        return final[torch.arange(len(slots), device=device), last]

    def draft(
        self,
        slots: list[int],
        depth: int,
        choose: Callable[[Float[Tensor, "R D"], int], Int[Tensor, " R"] | None],
    ) -> Int[Tensor, "R K"]:
        """Write up to `depth` draft tokens after the newest one of some rows, one pass each.

        The last one is not written: its keys are wanted only if it is accepted.

        Args:
            slots: rows whose texts have room for them.
            depth: draft tokens.
            choose: final hidden states of the rows and the depth so far to their next tokens; None
                ends the drafts, though not before the first.
        """
        texts = [self.texts[slot] for slot in slots]
        for text in texts:
            text.settle()
        hidden = self.feed(slots, [text.ids[len(text.written) :] for text in texts])
        lengths = [len(text.ids) for text in texts]
        rows = torch.tensor(slots, device=hidden.device)
        base = torch.tensor(lengths, device=hidden.device)
        drafts: list[Tensor] = []
        for k in range(depth):
            chosen = choose(hidden, k)
            if chosen is None:
                break
            drafts.append(chosen)
            if k + 1 < depth:
                step = Step(rows, drafts[-1].unsqueeze(1), base + k, max(lengths) + k + 1)
                hidden = self.run(step)[:, 0]
        found = torch.stack(drafts, dim=1)
        for text, draft in zip(texts, found.tolist(), strict=True):
            text.written.extend(draft[:-1])
        return found

    def catch_up(self, slots: list[int]) -> None:
        """Run what is known until at most a chunk of every row is left, the anchor included."""
        while True:
            behind = [
                slot
                for slot in slots
                if len(self.texts[slot].ids) - len(self.texts[slot].written) > CHUNK
                and self.texts[slot].has_room(1, self.longest)
            ]
            if not behind:
                return
            texts = [self.texts[slot] for slot in behind]
            pieces = [t.ids[len(t.written) : len(t.written) + CHUNK] for t in texts]
            self.feed(behind, pieces)
