"""Draft trees and verdicts: what a drafter proposes and what verification answers."""

from dataclasses import dataclass

import torch

from draftlab.errors import ShapeMismatch
from draftlab.shapes import Float, Int, Tensor


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A tree whose shape is fixed before decoding (Medusa, arXiv:2401.10774, section 2.3.3).

    Attributes:
        parents: index of each node's parent, -1 for a child of the anchor; parent < child.
        ranks: node n is its drafter's choice number `ranks[n]` after its parent, 0 the likeliest;
            siblings stand in order of rank.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Levels of the tree."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=0)


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """A tree grown where the drafter is sure (EAGLE-2, arXiv:2406.16858).

    Every level expands the `top_k` likeliest nodes by `top_k` children each; in the end the
    `num_nodes` likeliest of all levels stay.

    Attributes:
        num_nodes: N, draft nodes that are verified.
        top_k: children of a node, and nodes that a level expands.
        depth: levels.
    """

    num_nodes: int
    top_k: int
    depth: int


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens of R rows, each with the law it was really drawn from. A chain is a tree.

    Attributes:
        tokens: target ids; nodes at or past `num_nodes` hold any valid id and are never accepted.
        parents: index of the parent node, -1 for a child of the anchor; parent < child.
        num_nodes: nodes that count, 0..N; 0 means this row drafts nothing.
        law_probs: probability of each id of the support, given the node's ancestors and earlier
            siblings. A point mass is C = 1 with probability 1. Rows sum to 1.
        law_ids: the support, target ids, unique within a node; None when C = V in id order.
        confidence: how likely the node is to be accepted if its parent is, told from the prefix
            and the node's ancestors alone, never from the token drawn here: cutting a draft by it
            keeps the law (non-anticipation). None: the drafter has no opinion.
    """

    tokens: Int[Tensor, "R N"]
    parents: Int[Tensor, "R N"]
    num_nodes: Int[Tensor, " R"]
    law_probs: Float[Tensor, "R N C"]
    law_ids: Int[Tensor, "R N C"] | None
    confidence: Float[Tensor, "R N"] | None = None

    def __post_init__(self) -> None:
        """Refuse trees whose fields do not belong together."""
        if self.tokens.shape != self.parents.shape or self.law_probs.shape[:2] != self.tokens.shape:
            raise ShapeMismatch(
                f"tokens {tuple(self.tokens.shape)}, parents {tuple(self.parents.shape)} and "
                f"law_probs {tuple(self.law_probs.shape)} must agree on [R, N]"
            )

    @property
    def is_chain(self) -> bool:
        """True when every node is the child of the node before it."""
        steps = torch.arange(self.tokens.shape[1], device=self.parents.device) - 1
        return bool((self.parents == steps).all())

    @property
    def most_levels(self) -> int:
        """No path has more nodes than this: N, unless more is known of the shape."""
        return self.tokens.shape[1]


def chain_of_points(
    tokens: Int[Tensor, "R N"], num_nodes: Int[Tensor, " R"] | None = None
) -> DraftTree:
    """Build a chain of deterministic draft tokens (each law is a point mass)."""
    rows, depth = tokens.shape
    if num_nodes is None:
        num_nodes = torch.full((rows,), depth, dtype=torch.int64, device=tokens.device)
    return DraftTree(
        tokens=tokens,
        parents=chain_parents(rows, depth, tokens.device),
        num_nodes=num_nodes,
        law_probs=torch.ones(rows, depth, 1, device=tokens.device),
        law_ids=tokens.unsqueeze(-1),
    )


def chain_parents(rows: int, depth: int, device: torch.device) -> Int[Tensor, "R N"]:
    """Give the parents of a chain: -1, 0, 1, ..."""
    return (torch.arange(depth, device=device) - 1).expand(rows, depth)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided for R rows.

    Attributes:
        path: accepted node indices in order of depth, padded with -1.
        num_accepted: accepted draft tokens, 0..K.
        next_token: the correction (after a rejection) or the bonus token (after full acceptance);
            it becomes the new anchor.
    """

    path: Int[Tensor, "R K"]
    num_accepted: Int[Tensor, " R"]
    next_token: Int[Tensor, " R"]
