"""Multi-token prediction: one decoder layer on the target's final state, applied again and again.

In: the target's final hidden state and the token that followed. Out: drafts, a chain or a tree.
norm(hidden) and norm(embedding) are joined by `eh_proj`, run through a decoder layer and a norm,
and read by the target's LM head (DeepSeek-V3, arXiv:2412.19437, section 2.2). One module serves
every depth: it reads its own normed output in place of the target's (FastMTP, arXiv:2509.18362).
Read MTP, then `forward`; _mtp_layout.py has the modules that targets ship.

Position j pairs final state j with the embedding of token j + 1 and predicts token j + 2; which
predictions count: _self_fed_head.py.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._eagle_layer import EagleLayer, LayerMatrices, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import HeadMemory
from draftlab.drafters._mtp_layout import MIMO_PREFIX, check_fits, from_mimo
from draftlab.drafters._self_fed_head import SelfFedHead
from draftlab.drafters._weighing import StepLossSettings
from draftlab.drafters.base import DraftLoss, Observation, ServingWeights
from draftlab.drafters.layers import LayerSizes, RMSNorm, angles_of, layer_config
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.shapes import Float, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class MTPSettings(StepLossSettings):
    """Keys of conf/drafter/mtp.yaml.

    Attributes:
        start: random; layer copies a decoder layer of the target, so that the module begins as its
            continuation; checkpoint takes the module that the target ships (MiMo's layout).
        init_from_layer: 0-based target layer for start=layer, negative from the end; else None.
        intermediate_size: width of the MLP; None means the target's.
        attention_bias: q, k and v have biases, as Qwen2's and MiMo's layers do.
        hidden_first: `eh_proj` reads [hidden, embedding] (MiMo), else [embedding, hidden].
        unroll_steps: depths trained.
    """

    start: Literal["random", "layer", "checkpoint"]
    init_from_layer: int | None
    intermediate_size: PositiveInt | None
    attention_bias: bool
    hidden_first: bool
    unroll_steps: PositiveInt

    @model_validator(mode="after")
    def _check_start(self) -> "MTPSettings":
        if (self.start == "layer") != (self.init_from_layer is not None):
            raise ValueError(
                f"init_from_layer={self.init_from_layer} with start={self.start}; expected a layer "
                "with start=layer, and null otherwise"
            )
        if self.start == "checkpoint" and not self.hidden_first:
            raise ValueError(
                "hidden_first=false with start=checkpoint: MiMo's module reads the hidden state "
                "first; pass hidden_first=true"
            )
        return self


class MTP(SelfFedHead[MTPSettings], kind="mtp", settings=MTPSettings):
    """One module of multi-token prediction, for every depth."""

    def __init__(
        self, settings: MTPSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the module in float32 or wider, on the target's device.

        Raises:
            ConfigError: the target has no layer or module that could start it.
        """
        super().__init__(settings, target, vocab)
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self._angles = angles_of(target, sizes.head_dim)
        width = target.spec.hidden_size

        self.embedding_norm = RMSNorm(width, sizes.eps)
        self.hidden_norm = RMSNorm(width, sizes.eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = EagleLayer(sizes, is_first=False)
        if settings.attention_bias:
            _give_biases(self.layer)
        self.norm = RMSNorm(width, sizes.eps)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)
        if settings.init_from_layer is not None:
            self._start_from_layer(settings.init_from_layer)
        elif settings.start == "checkpoint":
            self._start_from_checkpoint()

    @torch.no_grad()
    def _start_from_layer(self, number: int) -> None:
        """Start as one more layer on the final state; the embedding is not read yet."""
        count = self.target.spec.num_layers
        layer = number + count if number < 0 else number
        if not 0 <= layer < count:
            raise ConfigError(
                f"init_from_layer={number}: target {self.target.spec.name} has {count} layers"
            )
        state = self.target.layer_state(layer)
        check_fits(
            state,
            dict(self.layer.named_parameters()),
            source=f"layer {layer} of target {self.target.spec.name}",
        )
        self.layer.load_state_dict(state)
        width = self.sizes.hidden
        self.eh_proj.weight.zero_()
        half = slice(0, width) if self._choices.hidden_first else slice(width, None)
        self.eh_proj.weight[:, half].fill_diagonal_(1.0)

    @torch.no_grad()
    def _start_from_checkpoint(self) -> None:
        name = self.target.spec.name
        found = from_mimo(self.target.raw_tensors(MIMO_PREFIX))
        if not found:
            raise ConfigError(
                f"start=checkpoint: the checkpoint of target {name} has no {MIMO_PREFIX}* tensors; "
                "use start=random or start=layer"
            )
        check_fits(found, self.state_dict(), source=f"the module of target {name}")
        self.load_state_dict(found)

    @property
    def _joiner(self) -> Any:
        return self.eh_proj

    def _layers(self) -> list[EagleLayer]:
        return [self.layer]

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Apply the module to its own output and compare every depth with the target."""
        assert features.final is not None, "`needs` asks for the final hidden state"
        predictions, hidden = self._unroll(
            batch,
            features.final.to(self.dtype),
            self._choices.unroll_steps,
            embed=self._embedder(batch),
            join=self._join,
            feed=self._feed_back,
        )
        return self._score(batch, features.final, predictions, hidden)

    def _embedder(self, batch: TokenBatch) -> Callable[[Tensor], Tensor]:
        """Embed as position by position is right: at position 0, which depth 0 alone has, zeros."""
        firsts = [batch.positions == 0]  # `unroll` begins with depth 0 at all positions

        def embed(ids: Tensor) -> Tensor:
            embedded = self._embed(ids)
            return embedded.masked_fill(firsts.pop().unsqueeze(-1), 0.0) if firsts else embedded

        return embed

    def _join(
        self,
        embedded: Float[Tensor, "*N D"],
        hidden: Float[Tensor, "*N D"],
        packed: PackedLinear | None = None,
    ) -> Float[Tensor, "*N D"]:
        """Make the layer's input; decoding brings `eh_proj` packed."""
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden)]
        joined = torch.cat(parts[::-1] if self._choices.hidden_first else parts, dim=-1)
        out = self.eh_proj(joined) if packed is None else packed(joined)
        return out.to(self.dtype)  # the residual stream keeps its precision

    def _feed_back(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Give what the LM head reads, which is also what the next depth reads."""
        normed = self.norm(hidden)
        return normed, normed

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HeadMemory:
        """Make buffers, rotary tables and fused matrices."""
        memory = super().open(slots, capacity, kv)
        if self._choices.attention_bias:
            memory.layers = [_with_biases(self.layer, memory.layers[0])]
        return memory

    def _features(self, state: HeadMemory, seen: Observation) -> Tensor:
        assert seen.final is not None, "`needs` asks for the final hidden state"
        return seen.final.to(self.dtype)

    def _feed(
        self, state: HeadMemory, where: NewPositions, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        embedded = self._embed(ids).masked_fill((where.positions == 0).unsqueeze(-1), 0.0)
        joined = self._join(embedded, hidden, state.fc)
        angles = state.cos[where.positions], state.sin[where.positions]
        out = decode_layers([self.layer], state.layers, embedded, joined, where, state.kv, angles)
        normed, fed = self._feed_back(out)
        return fed, state.head(normed)

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the module under our names; `_mtp_layout.to_mimo` gives them MiMo's."""
        return ServingWeights(
            architecture="mtp",
            config=layer_config(self.sizes, self.target)
            | {
                "draft_vocab_size": self._head.size,
                "attention_bias": self._choices.attention_bias,
                "hidden_first": self._choices.hidden_first,
                "num_nextn_predict_layers": 1,
            },
            tensors=dict(self.state_dict()) | self._head.serving_tensors(),
        )


def _give_biases(layer: EagleLayer) -> None:
    """Give q, k and v biases of zero."""
    attention = layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.bias = nn.Parameter(torch.zeros(projection.out_features))


def _with_biases(layer: EagleLayer, matrices: LayerMatrices) -> LayerMatrices:
    """Fuse q, k and v again, biases and all."""
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = PackedLinear(
        torch.cat([p.weight for p in projections]).detach(),
        torch.cat([p.get_parameter("bias") for p in projections]).detach(),
    )
    return LayerMatrices(qkv, matrices.out, matrices.gate_up, matrices.down)
