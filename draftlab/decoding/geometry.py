"""Where the nodes of a draft tree stand: depths, who sees whom, and how sure a whole path is.

In: parents (and confidences) of a `DraftTree`. Out: what a `Step` and a cut need. Pure functions.
Column 0 is the anchor; node n is column n + 1.
"""

import torch

from draftlab.shapes import Bool, Float, Int, Tensor


def place_nodes(
    parents: Int[Tensor, "R N"],
) -> tuple[Int[Tensor, "R T"], Bool[Tensor, "R T T"]]:
    """Compute each column's depth and which columns it may see, itself included; T = N + 1.

    Ancestors of 1, 2, 4, ... steps: paths are doubled until they span any tree of N nodes.
    """
    rows, count = parents.shape
    width = count + 1
    device = parents.device
    sees = torch.eye(width, device=device).expand(rows, width, width).clone()
    sees[:, 1:].scatter_(2, (parents + 1).unsqueeze(2), 1.0)
    reach = 1
    while reach < count:
        sees = (sees @ sees).clamp_max_(1.0)
        reach *= 2
    seen = sees > 0
    return seen.sum(2) - 1, seen


def path_confidence(
    parents: Int[Tensor, "R N"], confidence: Float[Tensor, "R N"], *, depth: int
) -> Float[Tensor, "R N"]:
    """Multiply confidences along each node's path; never above the parent's, to the last bit.

    Args:
        parents: of every node, -1 for a child of the anchor.
        confidence: chance of acceptance given the parent's, in [0, 1].
        depth: levels of the tree.
    """
    is_root = parents < 0
    above = parents.clamp_min(0)
    path = confidence
    for _ in range(depth - 1):
        path = torch.where(is_root, confidence, path.gather(1, above) * confidence)
    return path
