"""The network that block drafters share: one pass fills a block of unknown tokens after an anchor.

In: taps of the positions before the anchor, and the anchor. Out: a hidden state for every slot of
the block. Read BlockBackbone.forward; choose_anchors says which positions are trained as anchors.

Slot 0 holds the anchor's embedding, the others a mask embedding; slot j stands at the anchor's
position + j. The features of a position are computed once and give keys and values in every layer.
"""

from typing import ClassVar

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_layer import BlockLayer
from draftlab.drafters._spans import block_spans
from draftlab.drafters._taps import TapSettings
from draftlab.drafters._unrolling import PickedRows
from draftlab.drafters.layers import LayerSizes, RMSNorm, angles_of
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.view import TargetView

_SAMPLE_IDS = 256  # embeddings whose spread a learned mask embedding starts with


class BlockSettings(TapSettings):
    """Settings of block drafters.

    Attributes:
        block_size: slots of a block, the anchor's included.
        sliding_window: positions a slot may look back to, itself included; None means all.
        causal: a slot sees only the slots up to itself.
        mask_token_id: target id whose embedding stands in unknown slots; None learns one.
        max_anchors: blocks trained of a sample; None means one at every position it can have.
    """

    anchor_predicts: ClassVar[bool]  # the anchor's own slot predicts a token, as the others do
    block_size: int = Field(ge=2)
    sliding_window: PositiveInt | None
    causal: bool
    mask_token_id: int | None
    max_anchors: PositiveInt | None

    @property
    def num_predicted(self) -> int:
        """Draft tokens that a block proposes: one a slot that predicts."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @model_validator(mode="after")
    def _check_block(self) -> "BlockSettings":
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"sliding_window={self.sliding_window} is below block_size={self.block_size}; "
                "expected a window that holds a block, or null"
            )
        if self.num_draft_tokens > self.num_predicted:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens}: a block of "
                f"block_size={self.block_size} proposes at most {self.num_predicted}"
            )
        return self


class BlockBackbone(nn.Module):
    """Fused features, decoder layers over blocks, final norm."""

    mask_embedding: Tensor

    def __init__(self, settings: BlockSettings, target: TargetView, num_taps: int) -> None:
        """Build in float32 or wider, on the target's device.

        Raises:
            ConfigError: a mask token that the target does not have.
        """
        super().__init__()
        self.choices = settings
        self.target = target
        width = target.spec.hidden_size
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self.angles = angles_of(target, sizes.head_dim)
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, sizes.eps)
        self.layers = nn.ModuleList(BlockLayer(sizes) for _ in range(settings.num_layers))
        self.norm = RMSNorm(width, sizes.eps)
        mask = self._mask_embedding(settings.mask_token_id)
        if settings.mask_token_id is None:
            self.mask_embedding = nn.Parameter(mask)
        else:
            self.register_buffer("mask_embedding", mask, persistent=False)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)

    @torch.no_grad()
    def _mask_embedding(self, token_id: int | None) -> Float[Tensor, " D"]:
        target = self.target
        count = target.spec.vocab_size
        if token_id is None:
            ids = torch.arange(min(_SAMPLE_IDS, count), device=target.device)
            spread = target.embed(ids).float().std()
            return torch.randn(target.spec.hidden_size).to(target.device) * spread
        if not 0 <= token_id < count or token_id in target.spec.eos_ids:
            raise ConfigError(
                f"mask_token_id={token_id}: expected an id in 0..{count - 1} that is no end token; "
                "null learns an embedding"
            )
        return target.embed(torch.tensor([token_id], device=target.device))[0].clone()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def block_layers(self) -> list[BlockLayer]:
        """Give the layers by their type."""
        return [layer for layer in self.layers if isinstance(layer, BlockLayer)]

    def fuse_taps(self, taps: Float[Tensor, "*N L D"]) -> Float[Tensor, "*N D"]:
        """Join the taps of a position into what all layers read."""
        return self.hidden_norm(self.fc(taps.to(self.dtype).flatten(-2)))

    def fill(self, anchors: Int[Tensor, "*N"], slots: int) -> Float[Tensor, "*N S D"]:
        """Embed blocks: the anchor, then masks."""
        first = self.target.embed(anchors).detach().to(self.dtype).unsqueeze(-2)
        masks = self.mask_embedding.to(first.dtype)
        return torch.cat([first, masks.expand(*anchors.shape, slots - 1, -1)], dim=-2)

    def forward(
        self, batch: TokenBatch, taps: Float[Tensor, "B T L D"], anchors: PickedRows
    ) -> Float[Tensor, "B A S D"]:
        """Run a block at every anchor; nothing of a block depends on what follows its anchor.

        Args:
            batch: token rows.
            taps: the target's, of every position.
            anchors: positions of the anchors.
        """
        slots = self.choices.block_size
        steps = torch.arange(slots, device=taps.device)
        positions = anchors.take(batch.positions).unsqueeze(2) + steps
        window = self.choices.sliding_window
        spans = block_spans(batch.segment_ids, anchors.index, slots, window)
        fused = self.fuse_taps(taps)
        seen, own = self.angles(batch.positions), self.angles(positions)
        hidden = self.fill(anchors.take(batch.input_ids), slots)
        for layer in self.block_layers():
            context = layer.keys_values(fused, *seen)
            hidden = layer(hidden, context, spans, own, causal=self.choices.causal)
        return self.norm(hidden)


def choose_anchors(batch: TokenBatch, noise: Noise, max_anchors: int | None) -> Bool[Tensor, "B T"]:
    """Choose positions to train blocks at: those whose next token is learned, as decoding has them.

    The same ones for a sample wherever it is packed. A sample's first position is none: there is
    nothing before it.

    Args:
        batch: token rows.
        noise: which of them, when there are more.
        max_anchors: of a sample; None takes all.
    """
    allowed = batch.shifted_mask(1) & (batch.positions > 0)
    if max_anchors is None:
        return allowed
    rank = noise.uniform(batch.sample_ids, 1, "anchors").squeeze(-1)
    rank = torch.where(allowed, rank, torch.inf)
    stride = int(batch.segment_ids.max()) + 2
    rows = torch.arange(rank.shape[0], device=rank.device).unsqueeze(1)
    samples = (rows * stride + batch.segment_ids + 1).flatten()
    order = rank.flatten().argsort(stable=True)
    order = order[samples[order].argsort(stable=True)]
    grouped = samples[order]
    place = torch.empty_like(order)
    count = torch.arange(order.shape[0], device=order.device)
    place[order] = count - torch.searchsorted(grouped, grouped)
    return allowed & (place.view_as(allowed) < max_anchors)


def spread_taps(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Choose `count` taps evenly from the 2nd to the 3rd last layer; all around in shallow targets.

    DFlash's rule: 2, 10, 18, 26, 34 of 36 layers.
    """
    first, last = (2, num_layers - 2) if num_layers >= 8 else (1, num_layers)
    steps = max(count - 1, 1)
    return tuple(sorted({round(first + i * (last - first) / steps) for i in range(count)}))
