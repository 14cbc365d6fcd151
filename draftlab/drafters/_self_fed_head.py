"""A head that drafts token after token, reading its own output where the target's is not known yet.

Row t pairs a feature of position t with the embedding of token t + 1 and predicts token t + 2; at
depth s >= 1 there is no feature of position t + s yet, so what the head made of the depth before
takes its place. Loss rule: a prediction counts when the token *predicted* is learned (case O-06):
row t at depth s counts when token t + 2 + s is. Read _unroll, then the kinds.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._eagle_layer import EagleLayer, NewPositions
from draftlab.drafters._eagle_memory import (
    HeadMemory,
    close,
    observe,
    open_memory,
    propose_chain,
    propose_tree,
)
from draftlab.drafters._eagle_static import StaticHead
from draftlab.drafters._feature_drafter import FeatureDrafter, S
from draftlab.drafters._unrolling import Embed, FeedBack, Join, PickedRows, unroll
from draftlab.drafters._weighing import LossSettings
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.layers import Angles, LayerSizes, fuse
from draftlab.drafters.tree import DraftTree
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.packing import PackedLinear


class SelfFedHead(FeatureDrafter[S], kind=None, settings=LossSettings):
    """Training and decoding of such a head; a kind gives its network."""

    layers: nn.ModuleList
    sizes: LayerSizes
    _angles: Angles
    _window: int | None = None  # positions a row may look back to, itself included

    @property
    @abstractmethod
    def _joiner(self) -> Any:
        """Linear layer that makes the first layer's input or a part of it; adapters may wrap it."""

    @abstractmethod
    def _features(self, state: HeadMemory, seen: Observation) -> Float[Tensor, "R W D"]:
        """Give the target's features, as the head reads them."""

    @abstractmethod
    def _feed(
        self, state: HeadMemory, where: NewPositions, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the network over new positions; see `_eagle_memory.Feed`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._joiner.weight.dtype

    def _layers(self) -> list[EagleLayer]:
        return [layer for layer in self.layers if isinstance(layer, EagleLayer)]

    # ---------------------------------------------------------------- training

    def _unroll(
        self,
        batch: TokenBatch,
        features: Float[Tensor, "B T D"],
        depths: int,
        *,
        join: Join,
        feed: FeedBack,
        embed: Embed | None = None,
    ) -> tuple[Predictions, Float[Tensor, "K N D"]]:
        """Run the head over its own output; give weighed predictions and what the LM head reads.

        Rows that no depth learns from skip everything but the keys others look at.
        """
        masks = torch.stack([batch.shifted_mask(s + 2) for s in range(depths)])
        rows = PickedRows.pick(masks.any(0))
        states = unroll(
            self._layers(),
            batch,
            features,
            rows,
            depths=depths,
            embed=embed or self._embed,
            angles=self._angles,
            join=join,
            feed=feed,
            window=self._window,
        )
        predictions = Predictions.arrange(batch, masks, lead=2, dtype=self.dtype)
        hidden = predictions.take(states, rows.place)
        return self._weigh(batch, predictions, hidden), hidden

    def _noisy(
        self, features: Tensor, batch: TokenBatch, noise: Noise, half_width: float, purpose: str
    ) -> Tensor:
        """Add uniform noise while training."""
        if not self.training or half_width == 0:
            return features
        drawn = noise.uniform(batch.sample_ids, math.prod(features.shape[2:]), purpose)
        return features + (2 * drawn.view(features.shape) - 1).to(features.dtype) * half_width

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HeadMemory:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        weight, bias, ids = self._joiner.weight, self._joiner.bias, self._head.support()
        return open_memory(
            self._layers(),
            slots=slots,
            capacity=capacity,
            angles=self._angles(torch.arange(capacity + 1, device=weight.device)),
            ids=ids,
            fc=PackedLinear(weight.detach(), None if bias is None else bias.detach()),
            head=fuse(self._matrices[0][: ids.shape[0]].to(weight.dtype)),  # padding comes last
            window=self._window,
        )

    @torch.inference_mode()
    def observe(self, state: HeadMemory, seen: Observation) -> None:
        """Write keys and values by true features; keep the last position's own output."""
        observe(state, seen, self._features(state, seen), self._feed)

    @torch.inference_mode()
    def propose(
        self, state: HeadMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft a chain, or the tree that the budget asks for."""
        draft = propose_chain if budget.tree is None else propose_tree
        return draft(state, budget, uniforms, self._feed)

    def static_rounds(self) -> StaticHead:
        """Give the methods of rounds that run on the device alone."""
        return StaticHead(self._feed, self._features)

    @torch.inference_mode()
    def close(self, state: HeadMemory, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        close(state, rows)
