"""From the logits of all depths at once to a proposal, where no token knows the one before.

In: logits of K depths that depend on the prefix alone. Out: a chain, or the tree asked for: every
node of a level has the same law. Read propose_at_once.
"""

import torch

from draftlab.drafters._growth import grow, num_levels, temperature_of
from draftlab.drafters.base import DraftBudget
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError
from draftlab.sampling import Sampling, SamplingRows, draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor


def depth_of(budget: DraftBudget, deepest: int) -> int:
    """Give the depths that a proposal needs.

    Raises:
        ConfigError: more than a drafter has.
    """
    depth = budget.num_draft_tokens if budget.tree is None else num_levels(budget.tree)
    if depth > deepest:
        raise ConfigError(
            f"{depth} draft tokens in a row asked for: this drafter proposes at most {deepest}; "
            "ask for fewer"
        )
    return depth


def propose_at_once(
    budget: DraftBudget,
    logits: Float[Tensor, "R K C"],
    uniforms: Float[Tensor, "R N"],
    *,
    ids: Int[Tensor, " C"],
    num_nodes: Int[Tensor, " R"],
) -> DraftTree:
    """Propose a chain or a tree from logits of every depth.

    With `min_confidence` every node of a chain tells the largest probability of its law.

    Args:
        budget: what is asked for.
        logits: of the depths needed.
        uniforms: one a node.
        ids: target id of every column.
        num_nodes: draft tokens of a chain that fit; 0 for rows that hold nothing.
    """
    if budget.tree is not None:
        depths = iter(range(1, logits.shape[1]))

        def expand(_: Tensor, __: Tensor) -> Tensor:
            depth = next(depths)
            return logits[:, depth : depth + 1]

        return grow(
            budget,
            logits[:, 0],
            expand,
            uniforms,
            law=budget.sampling.drafting,
            ids=ids,
            is_live=num_nodes > 0,
        )
    told = None
    if budget.min_confidence is not None:
        told = largest_probability(logits, budget.sampling)
    if not budget.draws:
        return as_chain(ids[greedy_ids(logits)], None, ids, num_nodes, told)
    probs = process(logits, budget.sampling.drafting)
    return as_chain(ids[draw(probs, uniforms)], probs, ids, num_nodes, told)


def as_chain(
    tokens: Int[Tensor, "R K"],
    probs: Float[Tensor, "R K C"] | None,
    ids: Int[Tensor, " C"],
    num_nodes: Int[Tensor, " R"],
    confidence: Float[Tensor, "R K"] | None,
) -> DraftTree:
    """Build a chain of drawn tokens, or of points where there are no laws.

    Args:
        tokens: target ids.
        probs: law each was drawn from, over `ids`; None when they are points.
        ids: target id of every column.
        num_nodes: nodes that count.
        confidence: see `DraftTree`.
    """
    if probs is None:
        points = chain_of_points(tokens)
        probs, support = points.law_probs, points.law_ids
    else:
        support = ids.expand(*tokens.shape, -1)
    parents = chain_parents(tokens.shape[0], tokens.shape[1], tokens.device)
    return DraftTree(tokens, parents, num_nodes, probs, support, confidence)


def largest_probability(
    logits: Float[Tensor, "R K C"], sampling: Sampling | SamplingRows
) -> Float[Tensor, "R K"]:
    """Compute the probability of the likeliest token, at the temperature of a row."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature_of(sampling)
    return (wide.max(-1).values - wide.logsumexp(-1)).exp()
