"""Drafts grown from a place in a suffix index: chains, trees of a given shape, trees by share.

In: a `SuffixIndex` and a state of it. Out: a `Branch`. A token's share, how often it followed among
all that did, stands for the chance that the target says it.
"""

import heapq
from dataclasses import dataclass, field

from draftlab.drafters._suffix_index import SuffixIndex
from draftlab.drafters.tree import DynamicTree, StaticTree


@dataclass(slots=True)
class Branch:
    """Draft tokens of one row, parents first.

    Attributes:
        tokens: target ids.
        parents: index of each node's parent, -1 for a child of the anchor.
        shares: of each node among what followed its parent.
        score: draft tokens that are expected to be accepted: the sum of path shares.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    score: float = 0.0


def grow_chain(
    index: SuffixIndex, place: int, *, length: int, floor: float, sure: float, known: int
) -> Branch:
    """Follow the likeliest token of every place.

    Args:
        index: where it is read.
        place: a state of it.
        length: tokens at most.
        floor: smallest product of shares.
        sure: smallest share of a single token.
        known: ids from here on are no tokens (a prompt of raw ids may hold them).
    """
    branch, path = Branch(), 1.0
    for depth in range(length):
        following = index.likeliest(place)
        if following is None:
            break
        token, place, share = following
        path *= share
        if path < floor or share < sure or token >= known:
            break
        branch.tokens.append(token)
        branch.parents.append(depth - 1)
        branch.shares.append(share)
        branch.score += path
    return branch


def grow_static(
    index: SuffixIndex, place: int, shape: StaticTree, *, length: int, floor: float, known: int
) -> Branch:
    """Fill a shape with the choices it asks for; nodes without a token are left out."""
    branch = Branch()
    widest = max(shape.ranks) + 1
    choices = {-1: index.ranked(place, widest)}  # of each filled node of the shape
    at, depths, paths = {-1: -1}, {-1: 0}, {-1: 1.0}
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        if parent not in choices or rank >= len(choices[parent]) or depths[parent] >= length:
            continue
        token, following, share = choices[parent][rank]
        path = paths[parent] * share
        if path < floor or token >= known:
            continue
        at[node], depths[node], paths[node] = len(branch.tokens), depths[parent] + 1, path
        choices[node] = index.ranked(following, widest)
        branch.tokens.append(token)
        branch.parents.append(at[parent])
        branch.shares.append(share)
        branch.score += path
    return branch


def grow_dynamic(
    index: SuffixIndex, place: int, shape: DynamicTree, *, length: int, floor: float, known: int
) -> Branch:
    """Take the likeliest paths first, until the tree is full."""
    branch = Branch()
    # (-path share, order of arrival, token, its share, its state, parent, depth)
    waiting: list[tuple[float, int, int, float, int, int, int]] = []
    arrived = 0

    def expect(state: int, path: float, parent: int, depth: int) -> None:
        nonlocal arrived
        for token, following, share in index.ranked(state, shape.top_k):
            if path * share >= floor and token < known:
                arrived += 1
                entry = (-path * share, arrived, token, share, following, parent, depth)
                heapq.heappush(waiting, entry)

    expect(place, 1.0, -1, 1)
    while waiting and len(branch.tokens) < shape.num_nodes:
        negative, _, token, share, state, parent, depth = heapq.heappop(waiting)
        if depth < min(length, shape.depth):
            expect(state, -negative, len(branch.tokens), depth + 1)
        branch.tokens.append(token)
        branch.parents.append(parent)
        branch.shares.append(share)
        branch.score -= negative
    return branch
