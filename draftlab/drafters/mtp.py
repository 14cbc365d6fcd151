"""Multi-token prediction: one decoder layer on the target's final state, applied again and again.

In: the target's final hidden state and the token that followed. Out: drafts, a chain or a tree.
norm(hidden) and norm(embedding) are joined by `eh_proj`, run through a decoder layer and a norm,
and read by the target's LM head (DeepSeek-V3, arXiv:2412.19437, section 2.2). One module serves
every depth: it reads its own normed output in place of the target's (FastMTP, arXiv:2509.18362).
Read MTP, then `forward`; _mtp_layout.py has the modules that targets ship.

Position j pairs final state j with the embedding of token j + 1 and predicts token j + 2. A
prediction counts when the token *predicted* is learned (case O-06).
"""

from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions, score
from draftlab.drafters._eagle_layer import EagleLayer, LayerMatrices, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import (
    HeadMemory,
    close,
    observe,
    open_memory,
    propose_chain,
    propose_tree,
)
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._mtp_layout import MIMO_PREFIX, check_fits, from_mimo
from draftlab.drafters._unrolling import PickedRows, unroll
from draftlab.drafters._weighing import (
    Normalise,
    PositionWeights,
    check_position_weights,
    weigh,
)
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DraftLoss,
    DraftVocabSettings,
    Observation,
    ServingWeights,
)
from draftlab.drafters.layers import LayerSizes, RMSNorm, Rope, fuse, rope_of, signed_sin
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class MTPSettings(DraftVocabSettings):
    """Keys of conf/drafter/mtp.yaml.

    Attributes:
        start: random; layer copies a decoder layer of the target, so that the module begins as its
            continuation; checkpoint takes the module that the target ships (MiMo's layout).
        init_from_layer: 0-based target layer for start=layer, negative from the end; else None.
        intermediate_size: width of the MLP; None means the target's.
        attention_bias: q, k and v have biases, as Qwen2's and MiMo's layers do.
        hidden_first: `eh_proj` reads [hidden, embedding] (MiMo), else [embedding, hidden].
        unroll_steps: depths trained.
        position_weights: decay weighs depth k by step_decay ** k; d_pace by how likely it is
            reached.
        step_decay: for position_weights=decay, None otherwise.
        normalise: sequence gives every answer the same weight; token every token.
        objective: name of the per-token loss, as in draftlab.objectives.
    """

    start: Literal["random", "layer", "checkpoint"]
    init_from_layer: int | None
    intermediate_size: PositiveInt | None
    attention_bias: bool
    hidden_first: bool
    unroll_steps: PositiveInt
    position_weights: PositionWeights
    step_decay: float | None = Field(gt=0, le=1)
    normalise: Normalise
    objective: str

    @model_validator(mode="after")
    def _check_choices(self) -> "MTPSettings":
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
        check_position_weights(self.position_weights, self.step_decay, key="step_decay")
        try:
            objective(self.objective)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class MTP(Drafter, kind="mtp", settings=MTPSettings):
    """One module of multi-token prediction, for every depth."""

    grows_trees = True

    def __init__(
        self, settings: MTPSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the module in float32 or wider, on the target's device.

        Raises:
            ConfigError: the target has no layer or module that could start it.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.target = target
        self.vocab = vocab
        self._objective = objective(settings.objective)
        self.averages_tokens = settings.normalise == "token"
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self.rope: Rope = rope_of(target, sizes.head_dim)
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

        self._head = FrozenHead.of(target, vocab)

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
    def needs(self) -> FeatureRequest:
        """Ask for the final hidden state."""
        return FeatureRequest(wants_final=True)

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Apply the module to its own output and compare every depth with the target."""
        assert features.final is not None, "`needs` asks for the final hidden state"
        steps = self._choices.unroll_steps
        masks = torch.stack([batch.shifted_mask(s + 2) for s in range(steps)])
        rows = PickedRows.pick(masks.any(0))
        states = unroll(
            [self.layer],
            batch,
            features.final.to(self.eh_proj.weight.dtype),
            rows,
            depths=steps,
            embed=self._embedder(batch),
            angles=self._angles,
            join=self._join,
            feed=self._feed_back,
        )
        predictions = Predictions.arrange(
            batch,
            masks,
            lead=2,
            dtype=torch.promote_types(self.eh_proj.weight.dtype, torch.float32),
        )
        hidden, head = predictions.take(states, rows.place), self._head
        predictions = weigh(
            predictions,
            batch,
            hidden,
            [head.rows],
            head.ids,
            decay=self._choices.step_decay,
            normalise=self._choices.normalise,
        )
        return score(self._objective, predictions, hidden, head, [head.rows], batch, features.final)

    def _embedder(self, batch: TokenBatch) -> Callable[[Tensor], Tensor]:
        """Embed as position by position is right: at position 0, which depth 0 alone has, zeros."""
        firsts = [batch.positions == 0]  # `unroll` begins with depth 0 at all positions

        def embed(ids: Tensor) -> Tensor:
            embedded = self._embed(ids)
            return embedded.masked_fill(firsts.pop().unsqueeze(-1), 0.0) if firsts else embedded

        return embed

    def _embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return self.target.embed(ids).detach().to(self.eh_proj.weight.dtype)

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
        return out.to(self.eh_proj.weight.dtype)  # the residual stream keeps its precision

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(positions)
        return cos, signed_sin(sin)

    def _feed_back(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Give what the LM head reads, which is also what the next depth reads."""
        normed = self.norm(hidden)
        return normed, normed

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HeadMemory:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        weight = self.eh_proj.weight
        memory = open_memory(
            [self.layer],
            slots=slots,
            capacity=capacity,
            angles=self._angles(torch.arange(capacity + 1, device=weight.device)),
            ids=self._head.support(),
            fc=fuse(weight),
            head=self._head.packed(weight.dtype),
        )
        if self._choices.attention_bias:
            memory.layers = [_with_biases(self.layer, memory.layers[0])]
        return memory

    @torch.inference_mode()
    def observe(self, state: HeadMemory, seen: Observation) -> None:
        """Write keys and values by true states; keep the last position's output for `propose`."""
        assert seen.final is not None, "`needs` asks for the final hidden state"
        observe(state, seen, seen.final.to(self.eh_proj.weight.dtype), self._feed)

    @torch.inference_mode()
    def propose(
        self, state: HeadMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft a chain, or the tree that the budget asks for."""
        draft = propose_chain if budget.tree is None else propose_tree
        return draft(state, budget, uniforms, self._feed)

    @torch.inference_mode()
    def close(self, state: HeadMemory, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        close(state, rows)

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
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        tensors |= self._head.serving_tensors()
        return ServingWeights(
            architecture="mtp",
            config={
                "hidden_size": self.sizes.hidden,
                "intermediate_size": self.sizes.intermediate,
                "num_attention_heads": self.sizes.heads,
                "num_key_value_heads": self.sizes.kv_heads,
                "head_dim": self.sizes.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": self.sizes.eps,
                "rope_parameters": self.target.config.get("rope_parameters")
                or {"rope_type": "default", "rope_theta": 10000.0},
                "max_position_embeddings": self.target.spec.max_positions,
                "vocab_size": self.target.spec.vocab_size,
                "draft_vocab_size": self._head.size,
                "attention_bias": self._choices.attention_bias,
                "hidden_first": self._choices.hidden_first,
                "num_nextn_predict_layers": 1,
            },
            tensors=tensors,
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
