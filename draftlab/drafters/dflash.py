"""DFlash: one bidirectional pass fills a whole block of draft tokens (arXiv:2602.06036).

In: taps of the target and the anchor. Out: chains of draft tokens whose laws depend on the prefix
alone, not on each other; when training, a loss over every slot but the anchor's: slot j predicts
the token j after the anchor. Read first: _block_backbone.py, then forward and propose.

A bidirectional block always has all its slots, so a token's law does not depend on how many were
asked for; a causal one only as many as needed.
"""

from dataclasses import dataclass

import torch
from pydantic import model_validator

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_backbone import BlockBackbone, BlockSettings, choose_anchors
from draftlab.drafters._block_loss import arrange_blocks, weigh_blocks
from draftlab.drafters._block_memory import BlockMemory
from draftlab.drafters._block_serving import backbone_config, backbone_tensors
from draftlab.drafters._depth_scores import score
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._one_pass import depth_of, propose_at_once
from draftlab.drafters._unrolling import PickedRows
from draftlab.drafters.base import DraftBudget, Drafter, DraftLoss, Observation, ServingWeights
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class DFlashSettings(BlockSettings):
    """Keys of conf/drafter/dflash.yaml."""

    @model_validator(mode="after")
    def _check_tokens(self) -> "DFlashSettings":
        self.check_depth(self.block_size - 1)
        return self


@dataclass(slots=True)
class DFlashState:
    """Memory of the backbone, the LM head as decoding applies it, and the ids it says."""

    memory: BlockMemory
    head: PackedLinear
    ids: Int[Tensor, " C"]


class DFlash(Drafter, kind="dflash", settings=DFlashSettings):
    """A block drafter with the target's frozen LM head, each token on its own."""

    grows_trees = True

    def __init__(
        self, settings: DFlashSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the backbone.

        Args:
            settings: see conf/drafter/dflash.yaml.
            target: the frozen target; embedding and LM head stay its own.
            vocab: the draft vocabulary; None means the target's whole one.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.averages_tokens = settings.normalise == "token"
        self.target = target
        self.vocab = vocab
        self.max_draft_tokens = settings.block_size - 1
        self.backbone = BlockBackbone(settings, target)
        self._head = FrozenHead.of(target, vocab)

    @property
    def needs(self) -> FeatureRequest:
        """Taps for the backbone, the final state for the target's law."""
        return self.backbone.needs

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare every slot of every block with the target."""
        assert features.taps is not None
        assert features.final is not None
        choices, head = self._choices, self._head
        chosen = choose_anchors(batch, noise, choices.max_anchors)
        anchors = PickedRows.pick(chosen)
        blocks = self.backbone(batch, features.taps, anchors)
        predictions = arrange_blocks(batch, chosen, choices.block_size - 1, blocks.dtype)
        hidden = predictions.take(blocks[:, :, 1:].unbind(2), anchors.place)
        predictions = weigh_blocks(choices, predictions, batch, hidden, head)
        loss = objective(choices.objective)
        return score(loss, predictions, hidden, head, [head.rows], batch, features.final)

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> DFlashState:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        memory = BlockMemory(self.backbone, slots, capacity)
        return DFlashState(memory, self._head.packed(self.backbone.dtype), self._head.support())

    @torch.inference_mode()
    def observe(self, state: DFlashState, seen: Observation) -> None:
        """Write keys and values of true features."""
        state.memory.observe(seen)

    @torch.inference_mode()
    def propose(
        self, state: DFlashState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run one block and read the tokens off its slots: a chain, or the tree asked for."""
        rows = budget.rows
        depth = depth_of(budget, self._choices.block_size - 1)
        slots = depth + 1 if self._choices.causal else self._choices.block_size
        logits = state.head(state.memory.run(rows, slots)[:, 1 : depth + 1])
        num_nodes = state.memory.num_nodes(rows, depth)
        return propose_at_once(budget, logits, uniforms, ids=state.ids, num_nodes=num_nodes)

    @torch.inference_mode()
    def close(self, state: DFlashState, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        state.memory.close(rows)

    def serving_weights(self) -> ServingWeights:
        """Give the backbone; its first slot predicts nothing."""
        config = backbone_config(self.backbone, self._head)
        return ServingWeights(
            architecture="dflash",
            config=config | {"sample_from_anchor": False},
            tensors=backbone_tensors(self.backbone) | self._head.serving_tensors(),
        )
