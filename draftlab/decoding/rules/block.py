"""Block verification: the draft chain is judged as a whole, and the longest passing part stays."""

import torch

from draftlab.decoding.rules.chain import chain_verdict, draw_after_chain
from draftlab.decoding.rules.laws import check_rows, counting_nodes, own_probabilities
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.errors import ShapeMismatch
from draftlab.shapes import Float, Tensor


def verify_block(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    *,
    accept_uniforms: Float[Tensor, "R N"],
    next_uniforms: Float[Tensor, " R"],
) -> Verdict:
    """Accept the longest prefix whose own test passes, though an earlier test may have failed.

    Block verification (Sun et al., arXiv:2403.10444): with w_0 = 1 and
    w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the first i tokens pass with probability
    h_i = S_i / (S_i + 1 - w_i), S_i = sum over v of (w_i p - q)+ after them, and the whole draft
    with h = w. Since sum over v of min(w_i p, q) = w_i - S_i, exactly i tokens stay with
    probability S_i (given them), and then the next one is drawn from (w_i p - q)+: together
    w_i p, as it must be. It never accepts fewer tokens in expectation than token-level
    verification, and is exact for any law really drawn from, also where the length of a row's
    draft depends on the tokens before its end.

    Args:
        tree: a chain of N draft nodes a row.
        target_probs: p after all processors, rows sum to 1; row 0 is the anchor's, M = N + 1.
        accept_uniforms: one a node, in [0, 1), independent of the draws that made the chain.
        next_uniforms: one a row, for the correction or the bonus token.
    """
    check_rows(tree, target_probs)
    if not tree.is_chain:
        raise ShapeMismatch("block verification judges chains; this draft tree has branches")
    if tree.tokens.shape[1] == 0:
        next_token = draw_after_chain(tree, target_probs, tree.num_nodes, next_uniforms)
        return chain_verdict(tree, tree.num_nodes, next_token)
    weights = _weights(tree, target_probs)
    left = _left_over(tree, target_probs, weights)
    u = accept_uniforms.double()
    columns = torch.arange(tree.tokens.shape[1], device=u.device)
    # strict, so that weight 0 never passes; at weight 1 a test with nothing left, 0/0, is passed
    partial = (u * (left + 1 - weights) < left) | (weights == 1)
    whole = columns == (tree.num_nodes - 1).unsqueeze(1)
    passes = torch.where(whole, u < weights, partial) & counting_nodes(tree)
    num_accepted = ((columns + 1) * passes).max(1).values
    at = (num_accepted - 1).clamp_min(0).unsqueeze(1)
    scale = weights.gather(1, at).squeeze(1).masked_fill(num_accepted == 0, 1.0)
    next_token = draw_after_chain(tree, target_probs, num_accepted, next_uniforms, scale)
    return chain_verdict(tree, num_accepted, next_token)


def _weights(tree: DraftTree, target_probs: Float[Tensor, "R M V"]) -> Float[Tensor, "R N"]:
    """Compute w after each node, in float64."""
    p = target_probs[:, :-1].gather(2, tree.tokens.unsqueeze(2)).squeeze(2).double()
    ratios = p / own_probabilities(tree).double().clamp_min(torch.finfo(torch.float64).tiny)
    weights: list[Tensor] = []
    weight = torch.ones_like(ratios[:, 0])
    for ratio in ratios.unbind(1):
        weight = (weight * ratio).clamp_max(1)
        weights.append(weight)
    return torch.stack(weights, 1)


def _left_over(
    tree: DraftTree, target_probs: Float[Tensor, "R M V"], weights: Float[Tensor, "R N"]
) -> Float[Tensor, "R N"]:
    """Compute S after each node, as w less sum over v of min(w p, q); 0 after the last column."""
    left = torch.zeros_like(weights)
    for node in range(1, tree.tokens.shape[1]):
        p, q = target_probs[:, node], tree.law_probs[:, node]
        if tree.law_ids is not None:
            p = p.gather(1, tree.law_ids[:, node])
        weight = weights[:, node - 1]
        taken = torch.minimum(p * weight.to(p.dtype).unsqueeze(1), q.to(p.dtype)).sum(1)
        left[:, node - 1] = (weight - taken.double()).clamp_min(0)
    return left
