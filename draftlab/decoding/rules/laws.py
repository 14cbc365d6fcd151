"""What the laws of draft nodes say: q of the drawn token, q over the vocabulary, overlap with p."""

import torch

from draftlab.drafters.tree import DraftTree
from draftlab.errors import ShapeMismatch
from draftlab.shapes import Bool, Float, Int, Tensor


def own_probabilities(tree: DraftTree) -> Float[Tensor, "R N"]:
    """Give q(x) of each node's own token."""
    if tree.law_ids is None:
        return tree.law_probs.gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
    return (tree.law_probs * (tree.law_ids == tree.tokens.unsqueeze(2))).sum(2)


def law_over_vocabulary(
    tree: DraftTree, nodes: Int[Tensor, " R"], like: Float[Tensor, "R V"]
) -> Float[Tensor, "R V"]:
    """Spread the law of one node a row over the target's vocabulary."""
    rows = torch.arange(nodes.shape[0], device=nodes.device)
    law = tree.law_probs[rows, nodes].to(like.dtype)
    if tree.law_ids is None:
        return law
    return torch.zeros_like(like).scatter_(1, tree.law_ids[rows, nodes], law)


def compute_overlaps(tree: DraftTree, target_probs: Float[Tensor, "R M V"]) -> Float[Tensor, "R N"]:
    """Compute sum over v of min(p, q) at every node, p being the target's law after its parent.

    It is the exact chance that token-level verification accepts there, of a node without earlier
    siblings.
    """
    if tree.is_chain:
        p = target_probs[:, :-1]
    else:
        rows = torch.arange(target_probs.shape[0], device=target_probs.device).unsqueeze(1)
        if tree.law_ids is not None:
            p = target_probs[rows.unsqueeze(2), tree.parents.unsqueeze(2) + 1, tree.law_ids]
            return torch.minimum(p, tree.law_probs.to(p.dtype)).sum(2)
        p = target_probs[rows, tree.parents + 1]
    if tree.law_ids is not None:
        p = p.gather(2, tree.law_ids)
    return torch.minimum(p, tree.law_probs.to(p.dtype)).sum(2)


def counting_nodes(tree: DraftTree) -> Bool[Tensor, "R N"]:
    """Tell the nodes that may be accepted: those before `num_nodes`."""
    columns = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    return columns < tree.num_nodes.unsqueeze(1)


def may_hold(mask: Bool[Tensor, "..."]) -> bool:
    """Tell whether a mask may be True anywhere: asked on a CPU, where it costs next to nothing.

    Elsewhere the answer is always yes: the host would have to wait for it.
    """
    return mask.device.type != "cpu" or bool(mask.any())


def check_rows(tree: DraftTree, target: Float[Tensor, "R M V"] | Int[Tensor, "R M"]) -> None:
    """Refuse a target's rows that are not the anchor's and one for each node."""
    if target.shape[:2] != (tree.tokens.shape[0], tree.tokens.shape[1] + 1):
        raise ShapeMismatch(
            f"the target's rows {tuple(target.shape[:2])} do not fit a tree of "
            f"{tuple(tree.tokens.shape)} nodes; expected one row more than nodes: the anchor first"
        )
