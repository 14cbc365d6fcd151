"""The deepest path from the anchor whose nodes all pass a test that each node answers alone."""

import torch

from draftlab.decoding.rules.laws import counting_nodes, may_hold
from draftlab.drafters.tree import DraftTree
from draftlab.shapes import Bool, Int, Tensor


def find_deepest_path(
    passes: Bool[Tensor, "R N"], tree: DraftTree
) -> tuple[Int[Tensor, "R N"], Int[Tensor, " R"], Int[Tensor, " R"]]:
    """Find the longest accepted path; of equally long ones the one whose end has the lowest index.

    Args:
        passes: the test's answers; nodes that do not count fail whatever stands here.
        tree: a chain or a tree.

    Returns:
        The path padded with -1, its length, and the target's row after it (0 is the anchor's).
    """
    passes = passes & counting_nodes(tree)
    rows, num_nodes = tree.tokens.shape
    # depth[m]: of row m's node when its whole path passes, else -1; level after level
    depth = torch.full((rows, num_nodes + 1), -1, dtype=torch.int64, device=passes.device)
    depth[:, 0].zero_()
    above = tree.parents + 1
    for level in range(1, tree.most_levels + 1):
        parent_depth = depth.gather(1, above)
        reached = passes & (parent_depth == level - 1)
        if not may_hold(reached):
            break
        depth[:, 1:].masked_fill_(reached, level)
    length, end = depth.max(1)
    path = torch.full((rows, num_nodes + 1), -1, dtype=torch.int64, device=passes.device)
    node = end
    for _ in range(tree.most_levels):
        is_done = node == 0
        if not may_hold(~is_done):
            break
        # the last column takes what a finished row has to write; no `where` with a number: it
        # would bring the number to the device, and wait
        place = depth.gather(1, node.unsqueeze(1)).squeeze(1) - 1
        place = place.masked_fill(is_done, num_nodes)
        path.scatter_(1, place.unsqueeze(1), (node - 1).unsqueeze(1))
        up = above.gather(1, (node - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        node = up.masked_fill(is_done, 0)
    return path[:, :-1], length, end
