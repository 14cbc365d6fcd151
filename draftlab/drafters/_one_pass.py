"""From the logits of all depths at once to a proposal, where no token knows the one before.

In: logits of K depths that depend on the prefix alone. Out: a chain, or the tree asked for: every
node of a level has the same law. Read propose_at_once.
"""

from draftlab.drafters._chain import as_chain, largest_probability
from draftlab.drafters._growth import grow
from draftlab.drafters.base import DraftBudget
from draftlab.drafters.tree import DraftTree
from draftlab.sampling import draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor


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
