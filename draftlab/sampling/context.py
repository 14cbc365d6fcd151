"""What stands before each place a token is drawn for: prompt, answer, and a draft's ancestors.

In: prompts and tokens as they come, then a draft tree. Out: a `TokenContext` for its nodes. Sizes
grow with the distinct tokens of a row, never with the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftlab.errors import ShapeMismatch
from draftlab.shapes import Bool, Int, Tensor

_FIRST_WIDTH = 64


@dataclass(frozen=True, slots=True, eq=False)
class TokenContext:
    """Tokens before each of M places of R rows: the root (after the anchor), then each node.

    Attributes:
        ids: distinct tokens of prompt and answer; padding repeats the first of a row.
        output_counts: how often each stands in the answer, the prompt not counted.
        node_tokens: draft tokens.
        sees: whether node n stands before place m: it is m's own token or an ancestor of it.
        num_emitted: tokens of the answer before each place, ancestors included.
        eos_ids: end tokens.
    """

    ids: Int[Tensor, "R U"]
    output_counts: Int[Tensor, "R U"]
    node_tokens: Int[Tensor, "R N"]
    sees: Bool[Tensor, "R M N"]
    num_emitted: Int[Tensor, "R M"]
    eos_ids: Int[Tensor, " E"]

    def of_rows(self, rows: Int[Tensor, " r"] | None) -> "TokenContext":
        """Take some rows; None is all of them."""
        if rows is None:
            return self
        return TokenContext(
            self.ids[rows],
            self.output_counts[rows],
            self.node_tokens[rows],
            self.sees[rows],
            self.num_emitted[rows],
            self.eos_ids,
        )

    def list_tokens(
        self,
    ) -> tuple[Int[Tensor, "R C"], Bool[Tensor, "R M C"], Int[Tensor, "R M C"]]:
        """List candidates: tokens that stand before some place of a row.

        Returns:
            The tokens (one may be listed twice, with the same facts), whether each stands in
            prompt, answer or ancestors of a place, and how often in answer and ancestors.
        """
        places = self.sees.shape[1]
        tokens = torch.cat([self.ids, self.node_tokens], dim=1)
        if self.node_tokens.shape[1] == 0:
            counts = self.output_counts.unsqueeze(1).expand(-1, places, -1)
            return tokens, torch.ones_like(counts, dtype=torch.bool), counts
        same = self.node_tokens.unsqueeze(2) == tokens.unsqueeze(1)
        # a product of zeros and ones: exact in float32 up to 2^24 nodes
        drafted = torch.bmm(self.sees.float(), same.float()).long()
        known = same[:, :, : self.ids.shape[1]]
        node_counts = (known * self.output_counts.unsqueeze(1)).amax(2)
        counts = torch.cat([self.output_counts, node_counts], dim=1).unsqueeze(1) + drafted
        is_known = torch.cat([torch.ones_like(self.ids, dtype=torch.bool), known.any(2)], dim=1)
        return tokens, is_known.unsqueeze(1) | (drafted > 0), counts


class ContextTracker:
    """Keeps what is in each slot of a batch: distinct tokens, and how often the answer has them.

    `enter`, then `extend` with every token that comes out, then `leave`; `at` any time between.
    """

    def __init__(self, slots: int, eos_ids: Sequence[int], device: torch.device) -> None:
        """Start with empty slots.

        Args:
            slots: sequences that may live at once.
            eos_ids: end tokens, which `min_new_tokens` holds back; may be none.
            device: where the logits are.
        """
        self._device = device
        self._eos_ids = torch.tensor(sorted(set(eos_ids)), dtype=torch.int64, device=device)
        self._columns: list[dict[int, int]] = [{} for _ in range(slots)]
        self._ids = np.zeros((slots, _FIRST_WIDTH), dtype=np.int64)
        self._counts = np.zeros((slots, _FIRST_WIDTH), dtype=np.int64)
        self._emitted = np.zeros(slots, dtype=np.int64)

    def enter(self, slot: int, prompt_ids: Sequence[int]) -> None:
        """Put a prompt, of at least one token, into an empty slot."""
        assert prompt_ids, "a prompt has at least one token"
        assert not self._columns[slot], f"slot {slot} is taken"
        for token in prompt_ids:
            self._column(slot, token)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Take in tokens that came out, in order."""
        for token in tokens:
            column = self._column(slot, token)  # may make the tables wider
            self._counts[slot, column] += 1
        self._emitted[slot] += len(tokens)

    def leave(self, slot: int) -> None:
        """Empty a slot, so that another sequence may enter it."""
        self._columns[slot] = {}
        self._ids[slot] = 0
        self._counts[slot] = 0
        self._emitted[slot] = 0

    def at(
        self,
        rows: Sequence[int],
        node_tokens: Int[Tensor, "R N"] | None = None,
        parents: Int[Tensor, "R N"] | None = None,
    ) -> TokenContext:
        """Give the context of the M = N + 1 places of a draft tree, the root first.

        Args:
            rows: slots, in the order of the logits' rows.
            node_tokens: draft tokens; None is no draft, M = 1.
            parents: index of each node's parent, -1 for a child of the root; parent < child.
        """
        if node_tokens is None or parents is None:
            node_tokens = parents = torch.zeros(
                len(rows), 0, dtype=torch.int64, device=self._device
            )
        if node_tokens.shape != parents.shape or node_tokens.shape[0] != len(rows):
            raise ShapeMismatch(
                f"node_tokens {tuple(node_tokens.shape)} and parents {tuple(parents.shape)} do not "
                f"fit {len(rows)} rows"
            )
        index = np.asarray(rows, dtype=np.int64)
        used = np.array([len(self._columns[row]) for row in rows])
        assert used.all(), f"slots {rows}: one of them was never entered"
        width = int(used.max())
        ids, counts = self._ids[index, :width], self._counts[index, :width]
        padding = np.arange(width) >= used[:, None]
        ids, counts = (np.where(padding, table[:, :1], table) for table in (ids, counts))
        sees = see_ancestors(parents)
        return TokenContext(
            ids=self._tensor(ids),
            output_counts=self._tensor(counts),
            node_tokens=node_tokens,
            sees=sees,
            num_emitted=self._tensor(self._emitted[index]).unsqueeze(1) + sees.sum(2),
            eos_ids=self._eos_ids,
        )

    def _column(self, slot: int, token: int) -> int:
        columns = self._columns[slot]
        column = columns.setdefault(token, len(columns))
        if column == self._ids.shape[1]:
            self._ids, self._counts = (
                np.concatenate([table, np.zeros_like(table)], axis=1)
                for table in (self._ids, self._counts)
            )
        self._ids[slot, column] = token
        return column

    def _tensor(self, table: np.ndarray) -> Tensor:
        return torch.from_numpy(table).to(self._device)


def see_ancestors(parents: Int[Tensor, "R N"]) -> Bool[Tensor, "R M N"]:
    """Tell which nodes stand on the way from the root to each of M = N + 1 places, both included.

    By doubling: a step reaches parents, two of them grandparents, and so on; nothing is read back.
    """
    rows, nodes = parents.shape
    steps = torch.eye(nodes + 1, device=parents.device).repeat(rows, 1, 1)
    steps[:, 1:].scatter_(2, (parents + 1).unsqueeze(2), 1.0)
    reached = 1
    while reached < nodes:
        steps = torch.bmm(steps, steps).clamp_max(1.0)
        reached *= 2
    return steps[:, :, 1:] > 0
