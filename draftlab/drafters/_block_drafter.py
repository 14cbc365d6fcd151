"""What block drafters share: training at anchors, one pass a proposal, and what engines are told.

Slot j of a block stands j tokens after the anchor. A slot predicts either its own token, and the
anchor's nothing, or the token after it; which one is the kind's `anchor_predicts`. Read first:
_block_backbone.py, then BlockDrafter.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_backbone import (
    BlockBackbone,
    BlockSettings,
    choose_anchors,
    spread_taps,
)
from draftlab.drafters._block_memory import BlockMemory
from draftlab.drafters._chain import depth_of
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._feature_drafter import FeatureDrafter
from draftlab.drafters._unrolling import PickedRows
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.layers import layer_config
from draftlab.drafters.vocab import DraftVocab
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView

B = TypeVar("B", bound=BlockSettings)


@dataclass(slots=True)
class BlockState:
    """Memory of the backbone, the LM head as decoding applies it, and the ids it says."""

    memory: BlockMemory
    head: PackedLinear
    ids: Int[Tensor, " C"]


class BlockDrafter(FeatureDrafter[B], kind=None, settings=BlockSettings):
    """A drafter that reads its tokens off a block of the backbone."""

    def __init__(self, settings: B, target: TargetView, vocab: DraftVocab | None = None) -> None:
        """Build the backbone.

        Args:
            settings: of the kind.
            target: the frozen target; embedding and LM head stay its own.
            vocab: the draft vocabulary; None means the target's whole one.

        Raises:
            ConfigError: taps or a mask token that the target does not have.
        """
        taps = settings.tap_layers or spread_taps(target.spec.num_layers)
        super().__init__(settings, target, vocab, taps)
        self.max_draft_tokens = settings.num_predicted
        self.backbone = BlockBackbone(settings, target, len(taps))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.backbone.dtype

    def _predict(
        self, batch: TokenBatch, features: TargetFeatures, noise: Noise
    ) -> tuple[Predictions, Float[Tensor, "K N D"]]:
        """Run blocks: depth k of anchor a predicts token a + 1 + k, from the hidden state given."""
        assert features.taps is not None
        depths = self._choices.num_predicted
        chosen = choose_anchors(batch, noise, self._choices.max_anchors)
        anchors = PickedRows.pick(chosen)
        blocks = self.backbone(batch, features.taps, anchors)
        masks = torch.stack([chosen & batch.shifted_mask(k + 1) for k in range(depths)])
        predictions = Predictions.arrange(batch, masks, lead=1, dtype=self.dtype)
        return predictions, predictions.take(blocks[:, :, -depths:].unbind(2), anchors.place)

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> BlockState:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        memory = BlockMemory(self.backbone, slots, capacity)
        return BlockState(memory, self._head.packed(self.dtype), self._head.support())

    @torch.inference_mode()
    def observe(self, state: BlockState, seen: Observation) -> None:
        """Write keys and values of true features."""
        state.memory.observe(seen)

    def _run(
        self, state: BlockState, budget: DraftBudget
    ) -> tuple[Float[Tensor, "R K D"], Int[Tensor, " R"]]:
        """Run a block; give the hidden state of each depth asked for, and how many tokens fit.

        A two-way block always has all its slots, so a token's law does not depend on how many were
        asked for; a causal one only as many as needed.
        """
        choices, depth = self._choices, depth_of(budget, self._choices.num_predicted)
        silent = choices.block_size - choices.num_predicted
        slots = silent + depth if choices.causal else choices.block_size
        hidden = state.memory.run(budget.rows, slots)[:, silent : silent + depth]
        return hidden, state.memory.num_nodes(budget.rows, depth)

    @torch.inference_mode()
    def close(self, state: BlockState, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        state.memory.close(rows)

    def _serving_tensors(self) -> dict[str, Tensor]:
        """Name the backbone's tensors as all engines do; a mask embedding only where learned."""
        return dict(self.backbone.state_dict()) | self._head.serving_tensors()

    def _serving_config(self) -> dict[str, Any]:
        """Give sizes and switches that change the computation; taps are counted as ours are."""
        choices, spec = self._choices, self.target.spec
        return layer_config(self.backbone.sizes, self.target) | {
            "num_hidden_layers": choices.num_layers,
            "target_hidden_size": spec.hidden_size,
            "draft_vocab_size": self._head.size,
            "num_target_layers": spec.num_layers,
            "tap_layers": list(self.needs.tap_layers),
            "block_size": choices.block_size,
            "sample_from_anchor": choices.anchor_predicts,
            "causal": choices.causal,
            "sliding_window": choices.sliding_window,
            "mask_token_id": choices.mask_token_id,
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
