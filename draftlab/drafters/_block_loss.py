"""Which tokens the blocks of a batch predict, and what each counts. Read arrange_blocks."""

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_backbone import BlockSettings
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._weighing import weigh
from draftlab.shapes import Bool, Float, Tensor


def arrange_blocks(
    batch: TokenBatch, anchors: Bool[Tensor, "B T"], depths: int, dtype: torch.dtype
) -> Predictions:
    """Sort the predictions of all blocks by token: depth k of anchor a predicts a + 1 + k.

    Args:
        batch: token rows.
        anchors: positions that have a block.
        depths: K, tokens that a block predicts.
        dtype: of the blocks' output.
    """
    return Predictions.arrange(
        batch,
        torch.stack([anchors & batch.shifted_mask(k + 1) for k in range(depths)]),
        lead=1,
        dtype=torch.promote_types(dtype, torch.float32),
    )


def weigh_blocks(
    choices: BlockSettings,
    predictions: Predictions,
    batch: TokenBatch,
    hidden: Float[Tensor, "K N D"],
    head: FrozenHead,
) -> Predictions:
    """Weigh predictions as the settings say.

    Args:
        choices: position weights and normalisation.
        predictions: of the blocks.
        batch: token rows.
        hidden: what the head reads.
        head: the target's frozen one.
    """
    return weigh(
        predictions,
        batch,
        hidden,
        [head.rows],
        head.ids,
        decay=choices.step_decay,
        normalise=choices.normalise,
    )
