"""What all rules for chains share: the leading run, the token after it, the verdict."""

import torch

from draftlab.decoding.rules.laws import counting_nodes, law_over_vocabulary
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.sampling import draw, residual
from draftlab.shapes import Bool, Float, Int, Tensor


def count_leading(accepted: Bool[Tensor, "R N"], tree: DraftTree) -> Int[Tensor, " R"]:
    """Count the nodes accepted before the first one that is not, or does not count."""
    return (accepted & counting_nodes(tree)).long().cumprod(1).sum(1)


def draw_after_chain(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    num_accepted: Int[Tensor, " R"],
    next_uniforms: Float[Tensor, " R"],
    scale: Float[Tensor, " R"] | None = None,
) -> Int[Tensor, " R"]:
    """Draw the token after the accepted run: from p at its end, or from (scale * p - q)+.

    Args:
        tree: a chain.
        target_probs: p after all processors.
        num_accepted: length of the run; a row with all its nodes accepted draws from p.
        next_uniforms: one a row, in [0, 1).
        scale: weight of p in the residual, in (0, 1]; None is 1.
    """
    depth = tree.tokens.shape[1]
    if depth == 0:
        return draw(target_probs[:, 0], next_uniforms)
    at = num_accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    p = target_probs.gather(1, at).squeeze(1)
    q = law_over_vocabulary(tree, num_accepted.clamp_max(depth - 1), p)
    scaled = p if scale is None else p * scale.to(p.dtype).unsqueeze(1)
    rejected = (num_accepted < tree.num_nodes).unsqueeze(1)
    return draw(torch.where(rejected, residual(scaled, q), p), next_uniforms)


def chain_verdict(
    tree: DraftTree, num_accepted: Int[Tensor, " R"], next_token: Int[Tensor, " R"]
) -> Verdict:
    """Write down an accepted run: its nodes are the first ones."""
    columns = torch.arange(tree.tokens.shape[1], device=num_accepted.device)
    # no `where` with a number: it would bring the number to the device, and wait
    is_behind = columns >= num_accepted.unsqueeze(1)
    path = columns.expand(is_behind.shape).masked_fill(is_behind, -1)
    return Verdict(path=path, num_accepted=num_accepted, next_token=next_token)
