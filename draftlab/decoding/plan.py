"""How far and how wide to draft: the settings' choice, checked once against the drafter.

In: `DecodeSettings` and a drafter. Out: a `DraftPlan`.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from draftlab.decoding.settings import (
    BudgetedTreeSettings,
    DecodeSettings,
    DynamicTreeSettings,
    MeasuredTreeSettings,
    StaticTreeSettings,
)
from draftlab.drafters.base import Drafter
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What every proposal is asked for.

    Attributes:
        depth: K, levels of the tree or length of the chain.
        num_nodes: N, draft nodes a row at most.
        shape: the tree to ask for; None is a chain.
        is_budgeted: how many of the nodes are verified is chosen anew each round, from what passes
            cost and how sure the drafter is.
    """

    depth: int
    num_nodes: int
    shape: StaticTree | DynamicTree | None = None
    is_budgeted: bool = False


def make_plan(settings: DecodeSettings, drafter: Drafter | None) -> DraftPlan:
    """Choose depth and shape.

    Raises:
        ConfigError: a tree for a drafter that grows none, or deeper than it can propose.
    """
    if drafter is None:
        return DraftPlan(0, 0)
    plan = _plan_of(settings, drafter)
    if plan.shape is not None and not drafter.grows_trees:
        raise ConfigError(
            f"decode.tree asks for a tree, and a {drafter.kind} drafter proposes chains only; pass "
            "decode.tree=null, or a drafter that grows trees"
        )
    if drafter.max_draft_tokens is not None and plan.depth > drafter.max_draft_tokens:
        key = "num_draft_tokens" if settings.tree is None else "tree: depth"
        raise ConfigError(
            f"decode.{key}={plan.depth} is more than this {drafter.kind} drafter proposes; "
            f"expected at most {drafter.max_draft_tokens}"
        )
    return plan


def _plan_of(settings: DecodeSettings, drafter: Drafter) -> DraftPlan:
    tree = settings.tree
    if isinstance(tree, StaticTreeSettings):
        paths = _read_paths(tree.shape) if isinstance(tree.shape, str) else _spread(tree.shape)
        shape, depth = static_tree(paths)
        return DraftPlan(depth, len(shape.parents), shape)
    if isinstance(tree, DynamicTreeSettings):
        shape = DynamicTree(tree.num_nodes, tree.top_k, tree.depth)
        return DraftPlan(tree.depth, tree.num_nodes, shape)
    if isinstance(tree, BudgetedTreeSettings):
        if tree.top_k == 1:
            depth = min(tree.depth, tree.max_nodes)
            return DraftPlan(depth, depth, is_budgeted=True)
        shape = DynamicTree(tree.max_nodes, tree.top_k, tree.depth)
        return DraftPlan(tree.depth, tree.max_nodes, shape, is_budgeted=True)
    if isinstance(tree, MeasuredTreeSettings):
        shape = drafter.best_tree(tree.num_nodes)
        return DraftPlan(shape.depth, len(shape.parents), shape)
    depth = settings.num_draft_tokens or drafter.settings.num_draft_tokens
    return DraftPlan(depth, depth)


def static_tree(paths: list[list[int]]) -> tuple[StaticTree, int]:
    """Build a tree from its nodes, each told as the ranks on the way to it, and give its depth.

    Raises:
        ConfigError: no nodes, a node without its parent or told twice, or a gap in the ranks.
    """
    ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    place = {path: index for index, path in enumerate(ordered)}
    if not ordered or () in place or len(place) < len(ordered):
        raise ConfigError(
            f"a tree of {len(ordered)} nodes, {len(place)} of them distinct; expected lists of "
            "ranks such as [[0], [1], [0, 0]], each node once"
        )
    for path in ordered:
        before = (*path[:-1], path[-1] - 1)
        for needed in (path[:-1], before if path[-1] else ()):
            if needed and needed not in place:
                raise ConfigError(
                    f"node {list(path)} of the tree needs node {list(needed)}, which is not there; "
                    "add it"
                )
    parents = tuple(place.get(path[:-1], -1) for path in ordered)
    return StaticTree(parents, tuple(path[-1] for path in ordered)), len(ordered[-1])


def _spread(branches: list[int]) -> list[list[int]]:
    """List the nodes of a tree whose every node of a level has equally many children."""
    paths: list[list[int]] = []
    level: list[list[int]] = [[]]
    for children in branches:
        level = [[*path, rank] for path in level for rank in range(children)]
        paths += level
    return paths


def _read_paths(name: str) -> list[list[int]]:
    path = Path(name).expanduser()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the tree {name}: {error}; expected a JSON file of lists of ranks, such "
            "as [[0], [1], [0, 0]]"
        ) from None
    is_list = isinstance(found, list) and all(isinstance(path, list) for path in found)
    if not is_list or not all(type(rank) is int and rank >= 0 for path in found for rank in path):
        raise ConfigError(f"{name}: expected lists of ranks from 0, such as [[0], [1], [0, 0]]")
    return found
