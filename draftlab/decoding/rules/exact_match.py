"""Exact match: a draft token stays while it is the token the target itself chose."""

from draftlab.decoding.rules.chain import chain_verdict, count_leading
from draftlab.decoding.rules.deepest import find_deepest_path
from draftlab.decoding.rules.laws import check_rows
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.shapes import Int, Tensor


def verify_exact_match(tree: DraftTree, target_ids: Int[Tensor, "R M"]) -> Verdict:
    """Accept the path of draft tokens that equal the target's choice at their parent.

    Greedy decoding when `target_ids` are argmax ids. With ids *drawn* from the target's law this is
    sampled-verify: the output is always the drawn id, so its law is p whatever the drafter does,
    and, the draw at a node being keyed by its depth, it equals plain sampling with the same
    uniforms token for token.

    Args:
        tree: a chain or a tree of N draft nodes a row.
        target_ids: the target's choice after the anchor (column 0) and after each node; M = N + 1.

    Returns:
        The longest such path and the target's choice at its end; `path` has N columns.
    """
    check_rows(tree, target_ids)
    if tree.is_chain:
        num_accepted = count_leading(tree.tokens == target_ids[:, :-1], tree)
        next_token = target_ids.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return chain_verdict(tree, num_accepted, next_token)
    matches = tree.tokens == target_ids.gather(1, tree.parents + 1)
    path, num_accepted, end = find_deepest_path(matches, tree)
    return Verdict(path, num_accepted, target_ids.gather(1, end.unsqueeze(1)).squeeze(1))
