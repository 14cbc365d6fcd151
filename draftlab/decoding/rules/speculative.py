"""Token-level speculative sampling: each draft token is judged by itself, siblings in order."""

import torch

from draftlab.decoding.rules.chain import chain_verdict, count_leading, draw_after_chain
from draftlab.decoding.rules.laws import check_rows, counting_nodes, may_hold, own_probabilities
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.sampling import draw
from draftlab.shapes import Bool, Float, Int, Tensor


def verify_speculative(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    *,
    accept_uniforms: Float[Tensor, "R N"],
    next_uniforms: Float[Tensor, " R"],
) -> Verdict:
    """Accept draft token x with probability min(1, p(x)/q(x)); on rejection go on with (p - q)+.

    Speculative sampling (Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al.,
    arXiv:2302.01318). Exact when each token was drawn from the law its node carries: then
    min(p, q) + P(reject) * (p - q)+ / sum (p - q)+ = p. On a tree the next sibling is judged
    against what is left of p, by its own law, which knows that the siblings before it are gone;
    the argument repeats, and with the last sibling rejected what is left is drawn from. It covers

    - point masses (deterministic drafts; EAGLE-2, arXiv:2406.16858): q(x) = 1, so x is accepted
      with p(x), and what is left is p without x;
    - siblings drawn without replacement (recursive rejection; Jeon et al., arXiv:2402.14160).

    Args:
        tree: a chain or a tree of N draft nodes a row; siblings are tried in order of index.
        target_probs: p after all processors, rows sum to 1; row 0 is the anchor's, M = N + 1.
        accept_uniforms: one a node, in [0, 1), independent of the draws that made the tree.
        next_uniforms: one a row, for the correction or the bonus token.

    Returns:
        The accepted path and the token after it; `path` has N columns.
    """
    check_rows(tree, target_probs)
    if not tree.is_chain:
        return _walk(tree, target_probs, accept_uniforms, next_uniforms)
    p = target_probs[:, :-1].gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
    q = own_probabilities(tree)
    # strict, without a division: p = 0 is never accepted, not even at u = 0. In float64, where
    # no u below 1 becomes 1
    num_accepted = count_leading(accept_uniforms.double() * q.double() < p.double(), tree)
    next_token = draw_after_chain(tree, target_probs, num_accepted, next_uniforms)
    return chain_verdict(tree, num_accepted, next_token)


def _walk(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    accept_uniforms: Float[Tensor, "R N"],
    next_uniforms: Float[Tensor, " R"],
) -> Verdict:
    """Go down from the anchor, all rows in step: each step tries one child of each row's node."""
    rows, num_nodes = tree.tokens.shape
    device = tree.tokens.device
    row, column = torch.arange(rows, device=device), torch.arange(num_nodes, device=device)
    counts = counting_nodes(tree)
    thresholds = accept_uniforms.double() * own_probabilities(tree).double()
    at = torch.full((rows,), -1, device=device)  # the node accepted last; -1 is the anchor
    tried = at  # the last child tried, of any node: children have higher indices than parents
    p, mass = target_probs[:, 0].clone(), torch.ones(rows, dtype=torch.float64, device=device)
    path = torch.full((rows, num_nodes), -1, device=device)
    num_accepted = torch.zeros(rows, dtype=torch.int64, device=device)
    for _ in range(num_nodes):
        candidates = counts & (tree.parents == at.unsqueeze(1)) & (column > tried.unsqueeze(1))
        found, node = candidates.to(torch.int8).max(1)
        trying = found > 0
        if not may_hold(trying):
            break
        tried = torch.where(trying, node, tried)
        passes = thresholds[row, node] * mass < p[row, tree.tokens[row, node]].double()
        rejected, accepted = trying & ~passes, trying & passes
        if may_hold(rejected):
            p, mass = _without(tree, node, p, mass, rejected)
        if may_hold(accepted):
            p = torch.where(accepted.unsqueeze(1), target_probs[row, node + 1], p)
            mass = mass.masked_fill(accepted, 1.0)
            at = torch.where(accepted, node, at)
            path = torch.where(
                accepted.unsqueeze(1) & (column == num_accepted.unsqueeze(1)),
                node.unsqueeze(1),
                path,
            )
            num_accepted = num_accepted + accepted.long()
    return Verdict(path, num_accepted, draw(p, next_uniforms))


def _without(
    tree: DraftTree,
    node: Int[Tensor, " R"],
    p: Float[Tensor, "R V"],
    mass: Float[Tensor, " R"],
    rejected: Bool[Tensor, " R"],
) -> tuple[Float[Tensor, "R V"], Float[Tensor, " R"]]:
    """Give (p - mass * q)+ and its sum in the rejected rows; p where nothing is left."""
    row = torch.arange(node.shape[0], device=node.device)
    q = tree.law_probs[row, node].to(p.dtype) * mass.to(p.dtype).unsqueeze(1)
    if tree.law_ids is None:
        left = (p - q).clamp_min_(0)
    else:
        ids = tree.law_ids[row, node]
        left = p.scatter(1, ids, (p.gather(1, ids) - q).clamp_min_(0))
    left_mass = left.sum(1).double()
    changed = rejected & (left_mass > 0)
    return torch.where(changed.unsqueeze(1), left, p), torch.where(changed, left_mass, mass)
