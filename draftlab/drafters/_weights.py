"""How much each prediction counts, so that long answers do not dominate a loss."""

import torch

from draftlab.data.batch import TokenBatch
from draftlab.shapes import Bool, Float, Int, Tensor


def sequence_weights(
    batch: TokenBatch,
    rows: Int[Tensor, " N"],
    columns: Int[Tensor, " N"],
    counts: Bool[Tensor, " N"],
    dtype: torch.dtype,
) -> Float[Tensor, " N"]:
    """Give every prediction that counts 1 / (predictions of its sample that count), others 0.

    The weighted sum of losses is then the sum over samples of each sample's mean loss.

    Args:
        batch: where the predictions come from.
        rows: batch row of each prediction.
        columns: any position of its sample in that row.
        counts: False where there is no such prediction.
        dtype: of the result.
    """
    # a sample is one (row, segment) pair; fewer segments than positions fit in a row
    sample = rows * batch.input_ids.shape[1] + batch.segment_ids[rows, columns]
    sizes = torch.zeros(batch.input_ids.numel(), dtype=dtype, device=rows.device)
    sizes.index_add_(0, sample, counts.to(dtype))
    return counts.to(dtype) / sizes[sample].clamp_min(1)
