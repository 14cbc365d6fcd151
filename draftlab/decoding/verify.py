"""Lossless verification of draft chains: which draft tokens stay, and the token after them.

In: a draft tree, what the target says of it, uniforms. Out: a Verdict. Pure functions: no model, no
cache, no generator. Read `verify_exact_match` first, then `verify_speculative`.
"""

import torch

from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.errors import ShapeMismatch
from draftlab.sampling import draw, residual
from draftlab.shapes import Bool, Float, Int, Tensor


def verify_exact_match(tree: DraftTree, target_ids: Int[Tensor, "R M"]) -> Verdict:
    """Accept draft tokens while they equal the token the target chose at their place.

    Greedy decoding when `target_ids` are argmax ids. With ids *drawn* from the target's law this is
    sampled-verify: the output is always the drawn id, so its law is p whatever the drafter does,
    and it equals plain sampling with the same uniforms token for token.

    Args:
        tree: a chain of N draft nodes a row.
        target_ids: the target's choice after the anchor (column 0) and after each node; M = N + 1.
    """
    _check(tree, target_ids)
    match = tree.tokens == target_ids[:, :-1]
    num_accepted = _leading(match, tree)
    return _verdict(tree, num_accepted, target_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1))


def verify_speculative(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    *,
    accept_uniforms: Float[Tensor, "R N"],
    next_uniforms: Float[Tensor, " R"],
) -> Verdict:
    """Accept draft token x with probability min(1, p(x)/q(x)); on rejection draw from (p - q)+.

    Speculative sampling (Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al.,
    arXiv:2302.01318). Exact when each token was drawn from the law its node carries: then
    min(p, q) + P(reject) * (p - q)+ / sum (p - q)+ = p. A point-mass law (a deterministic draft)
    is the case q(x) = 1: accept with p(x), else draw from p without x.

    Args:
        tree: a chain of N draft nodes a row.
        target_probs: p after all processors, rows sum to 1; row 0 is the anchor's, M = N + 1.
        accept_uniforms: one a node, in [0, 1), independent of the draws that made the tree.
        next_uniforms: one a row, for the correction or the bonus token.
    """
    _check(tree, target_probs)
    rows, depth = tree.tokens.shape
    if depth == 0:
        return _verdict(tree, tree.num_nodes, draw(target_probs[:, 0], next_uniforms))
    p = target_probs[:, :-1].gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
    q = _own_probability(tree).to(p.dtype)
    # strict, without a division: p = 0 is never accepted, not even at u = 0
    num_accepted = _leading(accept_uniforms.to(p.dtype) * q < p, tree)
    at = num_accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    p_next = target_probs.gather(1, at).squeeze(1)
    node = num_accepted.clamp_max(depth - 1)
    index = torch.arange(rows, device=node.device)
    law = tree.law_probs[index, node].to(p.dtype)
    if tree.law_ids is None:
        q_next = law
    else:
        q_next = torch.zeros_like(p_next).scatter_add_(1, tree.law_ids[index, node], law)
    rejected = (num_accepted < tree.num_nodes).unsqueeze(1)
    p_next = torch.where(rejected, residual(p_next, q_next), p_next)
    return _verdict(tree, num_accepted, draw(p_next, next_uniforms))


def compute_overlaps(tree: DraftTree, target_probs: Float[Tensor, "R M V"]) -> Float[Tensor, "R N"]:
    """Compute sum over v of min(p, q) at every node: the exact chance of accepting there."""
    p = target_probs[:, :-1]
    if tree.law_ids is not None:
        p = p.gather(2, tree.law_ids)
    return torch.minimum(p, tree.law_probs.to(p.dtype)).sum(2)


def _own_probability(tree: DraftTree) -> Float[Tensor, "R N"]:
    """Give q(x) of each node's own token."""
    if tree.law_ids is None:
        return tree.law_probs.gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
    return (tree.law_probs * (tree.law_ids == tree.tokens.unsqueeze(2))).sum(2)


def _leading(accepted: Bool[Tensor, "R N"], tree: DraftTree) -> Int[Tensor, " R"]:
    """Count the nodes accepted before the first one that is not, or does not count."""
    columns = torch.arange(tree.tokens.shape[1], device=accepted.device)
    accepted = accepted & (columns < tree.num_nodes.unsqueeze(1))
    return accepted.long().cumprod(1).sum(1)


def _verdict(
    tree: DraftTree, num_accepted: Int[Tensor, " R"], next_token: Int[Tensor, " R"]
) -> Verdict:
    columns = torch.arange(tree.tokens.shape[1], device=num_accepted.device)
    path = torch.where(columns < num_accepted.unsqueeze(1), columns, -1)
    return Verdict(path=path, num_accepted=num_accepted, next_token=next_token)


def _check(tree: DraftTree, target: Tensor) -> None:
    if target.shape[:2] != (tree.tokens.shape[0], tree.tokens.shape[1] + 1):
        raise ShapeMismatch(
            f"the target's rows {tuple(target.shape[:2])} do not fit a tree of "
            f"{tuple(tree.tokens.shape)} nodes; expected one row more than nodes: the anchor first"
        )
    if not tree.is_chain:
        raise ShapeMismatch("these rules verify chains; this draft tree has branches")
