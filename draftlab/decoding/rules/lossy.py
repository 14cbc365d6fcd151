"""LOSSY rules: faster, and the output no longer has the target's law. Never called lossless.

They judge a draft token by p alone, so draft tokens the target would seldom say stay too often.
"""

import torch

from draftlab.decoding.rules.deepest import find_deepest_path
from draftlab.decoding.rules.laws import check_rows
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.sampling import draw
from draftlab.shapes import Bool, Float, Tensor


def verify_lossy_typical(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    *,
    next_uniforms: Float[Tensor, " R"],
    epsilon: float,
    delta: float,
) -> Verdict:
    """Accept x while p(x) > min(epsilon, delta * exp(-H(p))): more freely where p is flat. LOSSY.

    Typical acceptance (Medusa, arXiv:2401.10774, section 2.3.1). The longest accepted path wins,
    and the token after it is drawn from p. A one-hot p keeps its own token alone.

    Args:
        tree: a chain or a tree of N draft nodes a row.
        target_probs: p after all processors, rows sum to 1; row 0 is the anchor's, M = N + 1.
        next_uniforms: one a row, for the token after the path.
        epsilon: highest probability ever asked for, in (0, 1).
        delta: fraction of exp(-entropy in nats) that is asked for, in (0, 1).
    """
    check_rows(tree, target_probs)
    entropy = torch.special.entr(target_probs).sum(2)
    floor = (delta * torch.exp(-entropy)).clamp_max(epsilon)
    return _accept(
        tree, target_probs, _own(tree, target_probs) > _above(tree, floor), next_uniforms
    )


def verify_lossy_threshold(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    *,
    next_uniforms: Float[Tensor, " R"],
    threshold: float,
) -> Verdict:
    """Accept x while p(x) >= threshold * max p. LOSSY.

    The longest accepted path wins, and the token after it is drawn from p. A one-hot p keeps its
    own token alone.

    Args:
        tree: a chain or a tree of N draft nodes a row.
        target_probs: p after all processors, rows sum to 1; row 0 is the anchor's, M = N + 1.
        next_uniforms: one a row, for the token after the path.
        threshold: in (0, 1).
    """
    check_rows(tree, target_probs)
    floor = threshold * target_probs.max(2).values
    return _accept(
        tree, target_probs, _own(tree, target_probs) >= _above(tree, floor), next_uniforms
    )


def _own(tree: DraftTree, target_probs: Float[Tensor, "R M V"]) -> Float[Tensor, "R N"]:
    """Give p(x) of each node's token after its parent."""
    rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device).unsqueeze(1)
    return target_probs[rows, tree.parents + 1, tree.tokens]


def _above(tree: DraftTree, per_row: Float[Tensor, "R M"]) -> Float[Tensor, "R N"]:
    """Give each node what its parent's row says."""
    return per_row.gather(1, tree.parents + 1)


def _accept(
    tree: DraftTree,
    target_probs: Float[Tensor, "R M V"],
    passes: Bool[Tensor, "R N"],
    next_uniforms: Float[Tensor, " R"],
) -> Verdict:
    path, num_accepted, end = find_deepest_path(passes, tree)
    rows = torch.arange(end.shape[0], device=end.device)
    return Verdict(path, num_accepted, draw(target_probs[rows, end], next_uniforms))
