"""DFlash: one bidirectional pass fills a whole block of draft tokens (arXiv:2602.06036).

In: taps of the target and the anchor. Out: chains of draft tokens whose laws depend on the prefix
alone, not on each other; when training, a loss over every slot but the anchor's: slot j predicts
the token j after the anchor. Read first: _block_backbone.py, _block_drafter.py, then DFlash.
"""

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_backbone import BlockSettings
from draftlab.drafters._block_drafter import BlockDrafter, BlockState
from draftlab.drafters._one_pass import propose_at_once
from draftlab.drafters.base import DraftBudget, DraftLoss, ServingWeights
from draftlab.drafters.tree import DraftTree
from draftlab.randomness import Noise
from draftlab.shapes import Float, Tensor
from draftlab.targets.features import TargetFeatures


class DFlashSettings(BlockSettings):
    """Keys of conf/drafter/dflash.yaml."""

    anchor_predicts = False


class DFlash(BlockDrafter[DFlashSettings], kind="dflash", settings=DFlashSettings):
    """A block drafter with the target's frozen LM head, each token on its own."""

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare every slot of every block with the target."""
        assert features.final is not None
        predictions, hidden = self._predict(batch, features, noise)
        predictions = self._weigh(batch, predictions, hidden)
        return self._score(batch, features.final, predictions, hidden)

    @torch.inference_mode()
    def propose(
        self, state: BlockState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run one block and read the tokens off its slots: a chain, or the tree asked for."""
        hidden, num_nodes = self._run(state, budget)
        return propose_at_once(
            budget, state.head(hidden), uniforms, ids=state.ids, num_nodes=num_nodes
        )

    def serving_weights(self) -> ServingWeights:
        """Give the backbone; its first slot predicts nothing."""
        return ServingWeights("dflash", self._serving_config(), self._serving_tensors())
