"""Growing draft trees level by level, whatever network gives the laws. Pure tensor code over rows.

In: logits after the anchor, and a function that gives logits after nodes of the newest level. Out:
a `DraftTree`. Logits are over C columns: target ids, or those of a reduced draft vocabulary.
Read grow, then grow_static and grow_dynamic.

Whatever decides the shape comes from the prefix alone, so every tree here keeps the target's law:
drawn siblings are drawn without replacement and each carries the law it was drawn from; all other
trees are functions of the prefix, and their laws point masses.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch

from draftlab.drafters.base import DraftBudget
from draftlab.drafters.tree import DraftTree, DynamicTree, StaticTree
from draftlab.errors import ConfigError
from draftlab.sampling import Sampling, SamplingRows, draw, process
from draftlab.shapes import Bool, Float, Int, Tensor

# (columns [R W], parents [R W]) -> logits [R W C] after W nodes. `parents` counts among the nodes
# of the call before; at the first call all are children of the anchor and `parents` is 0. Logits
# [R 1 C] mean that all W nodes share them.
Expand = Callable[[Tensor, Tensor], Tensor]
Temperature = float | Tensor  # one for all, or [R 1 1]


def grow(
    budget: DraftBudget,
    logits: Float[Tensor, "R C"],
    expand: Expand,
    uniforms: Float[Tensor, "R N"],
    *,
    law: Sampling | SamplingRows,
    ids: Int[Tensor, " C"] | None,
    is_live: Bool[Tensor, " R"],
) -> DraftTree:
    """Grow the tree that a budget asks for.

    Args:
        budget: with a tree.
        logits: of the anchor's children.
        expand: see `Expand`; called level by level, never for nodes without children.
        uniforms: one a node, for trees that are drawn.
        law: how nodes are drawn where the budget draws.
        ids: target id of every column; None when they are equal.
        is_live: rows that hold something; the others draft nothing.

    Raises:
        ConfigError: more children of a node than there are columns.
    """
    assert budget.tree is not None
    temperature = temperature_of(budget.sampling)
    if isinstance(budget.tree, DynamicTree):
        found = grow_dynamic(budget.tree, logits, expand, temperature=temperature)
    elif budget.draws:
        found = grow_static_drawn(
            budget.tree, logits, expand, uniforms, law=law, temperature=temperature
        )
    else:
        found = grow_static(budget.tree, logits, expand, temperature=temperature)
    tokens = found.columns if ids is None else ids[found.columns]
    rows, count = tokens.shape
    if found.laws is None:
        probs, support = found.confidence.new_ones(rows, count, 1), tokens.unsqueeze(-1)
    else:
        probs, support = found.laws, None if ids is None else ids.expand(rows, count, -1)
    return DraftTree(
        tokens=tokens,
        parents=found.parents,
        num_nodes=is_live * count,
        law_probs=probs,
        law_ids=support,
        confidence=found.confidence,
    )


@dataclass(frozen=True, slots=True)
class Grown:
    """A tree in columns.

    Attributes:
        columns: of every node.
        parents: parent node, -1 for a child of the anchor; parent < child, siblings by rank.
        confidence: the draft's probability of its choice number `rank` after the node's parent;
            known before any node of that family is drawn.
        laws: law of each node given its ancestors and earlier siblings; None for point masses.
    """

    columns: Int[Tensor, "R N"]
    parents: Int[Tensor, "R N"]
    confidence: Float[Tensor, "R N"]
    laws: Float[Tensor, "R N C"] | None


def grow_static(
    shape: StaticTree, logits: Float[Tensor, "R C"], expand: Expand, *, temperature: Temperature
) -> Grown:
    """Fill a fixed shape with the likeliest tokens: node n takes choice `ranks[n]` of its parent.

    Medusa (arXiv:2401.10774, section 2.3.3) and EAGLE (arXiv:2401.15077) decode greedily so.
    """
    columns, confidence = [], []
    scores = logits.unsqueeze(1)
    for level in plan_levels(shape):
        best, log_probs = _likeliest(scores, max(level.ranks) + 1, temperature)
        best, log_probs = (x.expand(-1, level.num_parents, -1) for x in (best, log_probs))
        families, ranks = (
            _index(values, logits.device) for values in (level.families, level.ranks)
        )
        columns.append(best[:, families, ranks])
        confidence.append(log_probs[:, families, ranks].exp())
        if level.opened:
            scores = expand(*_open(level, columns[-1]))
    return _assemble(shape, columns, confidence, None)


def grow_static_drawn(
    shape: StaticTree,
    logits: Float[Tensor, "R C"],
    expand: Expand,
    uniforms: Float[Tensor, "R N"],
    *,
    law: Sampling | SamplingRows,
    temperature: Temperature,
) -> Grown:
    """Fill a fixed shape with drawn tokens, siblings without replacement.

    The law of a sibling is that of its parent's children with the earlier siblings taken out; the
    order of drawing is the order of testing (Sequoia, arXiv:2402.12374; recursive rejection
    sampling, arXiv:2402.14160). Taking a token out of the logits keeps the rest exact however
    little mass it has.
    """
    columns, confidence, laws = [], [], []
    scores = logits.unsqueeze(1)
    for level in plan_levels(shape):
        order, device = level.birth_order, logits.device
        _, log_probs = _likeliest(scores, max(order) + 1, temperature)
        log_probs = log_probs.expand(-1, level.num_parents, -1)
        families = _index(level.families, device)
        confidence.append(log_probs[:, families, _index(order, device)].exp())
        left = scores.expand(-1, level.num_parents, -1).clone()
        drawn = logits.new_zeros(logits.shape[0], len(level.nodes), dtype=torch.int64)
        for turn in range(max(order) + 1):
            here = tuple(i for i, number in enumerate(order) if number == turn)
            nodes = tuple(level.nodes[i] for i in here)
            parents = _index(tuple(level.families[i] for i in here), device)
            remaining = left.index_select(1, parents)
            q = process(remaining, law)
            taken = draw(q, uniforms.index_select(1, _index(nodes, device)))
            drawn.index_copy_(1, _index(here, device), taken)
            laws.append((nodes, q))
            remaining = remaining.scatter(2, taken.unsqueeze(-1), -torch.inf)
            left.index_copy_(1, parents, remaining)
        columns.append(drawn)
        if level.opened:
            scores = expand(*_open(level, drawn))
    return _assemble(shape, columns, confidence, laws)


def grow_dynamic(
    shape: DynamicTree, logits: Float[Tensor, "R C"], expand: Expand, *, temperature: Temperature
) -> Grown:
    """Expand where the draft is sure, then keep the best nodes (EAGLE-2, arXiv:2406.16858).

    A node's value is the draft's probability of its whole path. Each level expands the `top_k` best
    nodes of the level before by their `top_k` likeliest children; of all nodes the `num_nodes` best
    stay. A child is never worth more than its parent and comes after it, so with stable sorting the
    kept nodes are connected. Deterministic, so that each node is a point mass.
    """
    width = shape.top_k
    rows = logits.shape[0]
    scores, value = logits.unsqueeze(1), logits.new_zeros(rows, 1, dtype=_wide(logits.dtype))
    frontier = torch.full((rows, 1), -1, dtype=torch.int64, device=logits.device)
    columns, values, parents, confidence = [], [], [], []
    count = 0
    for depth in range(shape.depth):
        best, log_probs = _likeliest(scores, width, temperature)
        best, log_probs = (x.expand(-1, frontier.shape[1], -1) for x in (best, log_probs))
        children = (value.unsqueeze(-1) + log_probs).flatten(1)
        columns.append(best.flatten(1))
        values.append(children)
        parents.append(frontier.repeat_interleave(width, dim=1))
        confidence.append(log_probs.exp().flatten(1))
        if depth == shape.depth - 1:
            break
        kept = children.sort(dim=1, descending=True, stable=True).indices[:, :width]
        value, frontier = children.gather(1, kept), count + kept
        count += children.shape[1]
        scores = expand(columns[-1].gather(1, kept), kept // width)

    order = torch.cat(values, 1).sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : shape.num_nodes].sort(dim=1).values  # level by level, parents first
    place = torch.full_like(order, -1)
    place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=order.device).expand_as(chosen))
    above = torch.cat(parents, 1).gather(1, chosen)
    return Grown(
        columns=torch.cat(columns, 1).gather(1, chosen),
        parents=place.gather(1, above.clamp_min(0)).masked_fill(above < 0, -1),
        confidence=torch.cat(confidence, 1).gather(1, chosen),
        laws=None,
    )


def num_expanded(shape: StaticTree | DynamicTree) -> int:
    """Count the nodes that `expand` is asked about: the memory a draft of this shape needs."""
    if isinstance(shape, DynamicTree):
        return (shape.depth - 1) * shape.top_k
    return len(set(shape.parents) - {-1})


def num_levels(shape: StaticTree | DynamicTree) -> int:
    """Count the levels of a shape."""
    return shape.depth if isinstance(shape, DynamicTree) else len(plan_levels(shape))


def temperature_of(sampling: Sampling | SamplingRows) -> Temperature:
    """Give what scores are divided by: 1 for greedy rows, whose draft law is told unscaled."""
    if isinstance(sampling, Sampling):
        return sampling.temperature or 1.0
    known = sampling.temperature
    return torch.where(known > 0, known, 1.0).view(-1, 1, 1)


def best_static_tree(rates: Sequence[Sequence[float]], num_nodes: int) -> StaticTree:
    """Choose the shape that accepts most tokens, given how often each choice is right.

    A node is accepted when every choice on its path is right; taking that as the product of the
    rates, as Medusa does (arXiv:2401.10774, section 2.3.3), the best tree of any size is the nodes
    of largest product.

    Args:
        rates: rates[d][r] is how often the choice of rank r is right at depth d, 0..1.
        num_nodes: N; the tree has fewer when the rates have fewer nodes above 0.

    Raises:
        ConfigError: no rate is above 0.
    """
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = []

    def offer(value: float, path: tuple[int, ...]) -> None:
        depth, rank = len(path) - 1, path[-1]
        if depth < len(rates) and rank < len(rates[depth]) and rates[depth][rank] > 0:
            heapq.heappush(waiting, (-value * rates[depth][rank], path))

    values: dict[tuple[int, ...], float] = {(): 1.0}
    offer(1.0, (0,))
    while waiting and len(found) < num_nodes:
        value, path = heapq.heappop(waiting)
        found.append(path)
        values[path] = -value
        offer(-value, (*path, 0))
        # a choice is offered after the one before it: shapes have no gaps in their ranks
        offer(values[path[:-1]], (*path[:-1], path[-1] + 1))
    nodes = sorted(found, key=lambda path: (len(path), path))
    if not nodes:
        raise ConfigError(
            f"no choice of {len(rates)} heads was ever right, so there is no best tree; train "
            "longer, or measure on more answers"
        )
    index = {path: i for i, path in enumerate(nodes)} | {(): -1}
    return StaticTree(tuple(index[p[:-1]] for p in nodes), tuple(p[-1] for p in nodes))


@dataclass(frozen=True, slots=True)
class Level:
    """A level of a static shape.

    Attributes:
        nodes: in order of index.
        num_parents: nodes of the level above that have children; 1 for the anchor's.
        families: for each node, which of those is its parent.
        ranks: of each node.
        birth_order: how many siblings come before each node.
        opened: which of `nodes` have children.
        opened_families: their `families`.
    """

    nodes: tuple[int, ...]
    num_parents: int
    families: tuple[int, ...]
    ranks: tuple[int, ...]
    birth_order: tuple[int, ...]
    opened: tuple[int, ...]
    opened_families: tuple[int, ...]


@lru_cache(maxsize=64)
def plan_levels(shape: StaticTree) -> tuple[Level, ...]:
    """Order the nodes of a shape by depth.

    Raises:
        ConfigError: not a tree, or siblings that are not in order of rank.
    """
    _check(shape)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(shape.parents):
        children.setdefault(parent, []).append(node)
    levels, above = [], [-1]
    while above:
        nodes = tuple(sorted(child for node in above for child in children[node]))
        families = tuple(above.index(shape.parents[node]) for node in nodes)
        opened = tuple(i for i, node in enumerate(nodes) if node in children)
        levels.append(
            Level(
                nodes=nodes,
                num_parents=len(above),
                families=families,
                ranks=tuple(shape.ranks[node] for node in nodes),
                birth_order=tuple(children[shape.parents[node]].index(node) for node in nodes),
                opened=opened,
                opened_families=tuple(families[i] for i in opened),
            )
        )
        above = [nodes[i] for i in opened]
    return tuple(levels)


def _check(shape: StaticTree) -> None:
    parents, ranks = shape.parents, shape.ranks
    fits = len(parents) == len(ranks) and len(parents) > 0
    fits = fits and all(-1 <= parent < node for node, parent in enumerate(parents))
    last: dict[int, int] = {}
    for parent, rank in zip(parents, ranks, strict=False):
        fits = fits and rank > last.get(parent, -1)
        last[parent] = rank
    if not fits:
        raise ConfigError(
            f"static tree with parents {list(parents)} and ranks {list(ranks)}: expected as many "
            "ranks as nodes, at least one, every parent before its children (-1: the anchor), and "
            "siblings in order of distinct ranks from 0"
        )


def _likeliest(
    scores: Float[Tensor, "R W C"], count: int, temperature: Temperature
) -> tuple[Int[Tensor, "R W k"], Float[Tensor, "R W k"]]:
    """Give the likeliest columns and the logs of their probabilities, the likeliest first."""
    if count > scores.shape[-1]:
        raise ConfigError(
            f"a tree with {count} children of a node cannot be grown over {scores.shape[-1]} "
            "draft tokens; ask for fewer"
        )
    scores = scores.to(_wide(scores.dtype))
    if isinstance(temperature, Tensor):
        scores = scores / temperature.to(scores.dtype)
    elif temperature != 1.0:
        scores = scores / temperature
    top = scores.topk(count, dim=-1)
    # rounding must not let a child be worth more than its parent
    return top.indices, (top.values - scores.logsumexp(-1, keepdim=True)).clamp_max(0)


def _assemble(
    shape: StaticTree,
    columns: list[Tensor],
    confidence: list[Tensor],
    laws: list[tuple[tuple[int, ...], Tensor]] | None,
) -> Grown:
    """Put levels back in the order of the shape's nodes."""
    order = [node for level in plan_levels(shape) for node in level.nodes]
    joined = torch.cat(columns, 1)
    device = joined.device
    back = _index(_inverse(order), device)
    stacked = None
    if laws is not None:
        drawn = [node for nodes, _ in laws for node in nodes]
        where = _index(_inverse(drawn), device)
        stacked = torch.cat([law for _, law in laws], 1).index_select(1, where)
    return Grown(
        columns=joined.index_select(1, back),
        parents=_index(shape.parents, device).expand(joined.shape),
        confidence=torch.cat(confidence, 1).index_select(1, back),
        laws=stacked,
    )


def _inverse(order: list[int]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _open(level: Level, columns: Int[Tensor, "R W"]) -> tuple[Int[Tensor, "R Wo"], Tensor]:
    """Give the columns of the nodes that have children, and their parents, as `Expand` takes them.

    Args:
        level: of the nodes.
        columns: of all of them.
    """
    opened, families = (
        _index(values, columns.device) for values in (level.opened, level.opened_families)
    )
    return columns.index_select(1, opened), families.expand(columns.shape[0], -1)


@cache
def _index(values: tuple[int, ...], device: torch.device) -> Int[Tensor, " N"]:
    """Put numbers of a shape on the device: once, since a captured round cannot wait for them.

    Nothing is ever dropped: a captured round keeps reading it.
    """
    with torch.inference_mode(False):  # whoever asks first, others may need gradients
        return torch.tensor(values, dtype=torch.int64, device=device)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
