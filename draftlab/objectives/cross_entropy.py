"""Learning the data's own next token, whatever law the target gave it."""

from draftlab.shapes import Float, Int, Tensor


def cross_entropy(log_q: Float[Tensor, "N C"], columns: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Compute -log q of the data token.

    Args:
        log_q: draft law, float32 or wider.
        columns: column of the data token; -1 where q has none for it, which gives 0.
    """
    picked = log_q.gather(-1, columns.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (-picked).masked_fill(columns < 0, 0.0)
