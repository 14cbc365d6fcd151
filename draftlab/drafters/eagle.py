"""EAGLE: a decoder layer that continues the target's last hidden state, read by the target's head.

In: the target's final hidden states and the tokens that followed. Out: chains or trees of draft
tokens; when training, a loss over `hass_steps` depths. Read first: Eagle, forward, then _feed.

Papers: EAGLE-1 arXiv:2401.15077; trees of EAGLE-2 arXiv:2406.16858 (`_growth.py`); training on own
output and the top-K loss of HASS arXiv:2408.15766.

Position j pairs feature j with the embedding of token j + 1 and predicts feature j + 1, which the
target's head reads as a law of token j + 2. Loss rule: a prediction counts when the token
*predicted* is learned (case O-06): row t at depth s counts when token t + 2 + s is.
"""

from dataclasses import replace

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions, score
from draftlab.drafters._eagle_layer import EagleLayer, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import (
    HeadMemory,
    close,
    observe,
    open_memory,
    propose_chain,
    propose_tree,
)
from draftlab.drafters._eagle_static import StaticHead
from draftlab.drafters._frozen_head import FrozenHead
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
from draftlab.drafters.layers import LayerSizes, Rope, rope_of, signed_sin
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import DraftVocab, judged_rows
from draftlab.objectives.features import smooth_l1
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class EagleSettings(DraftVocabSettings):
    """Keys of conf/drafter/eagle.yaml.

    Attributes:
        num_layers: decoder layers of the head; the first has no norm before its attention.
        intermediate_size: width of its MLP; None means the target's.
        fc_bias: a bias where embedding and feature are joined.
        hass_steps: depths trained, each on the head's own output; 1 is EAGLE-1, true features only.
        feature_weight: weight of the SmoothL1 distance to the target's next feature.
        position_weights: decay weighs depth s by step_decay ** s; d_pace by how likely it is
            reached.
        step_decay: for position_weights=decay, None otherwise.
        normalise: sequence gives every answer the same weight; token every token.
        objective: name of the loss between the laws, such as 0.1*forward_kl+top_k.
        feature_noise: half-width of uniform noise on the features while training.
    """

    num_layers: PositiveInt
    intermediate_size: PositiveInt | None
    fc_bias: bool
    hass_steps: PositiveInt
    feature_weight: NonNegativeFloat
    position_weights: PositionWeights
    step_decay: float | None = Field(gt=0, le=1)
    normalise: Normalise
    objective: str
    feature_noise: NonNegativeFloat

    @field_validator("objective")
    @classmethod
    def _check_objective(cls, name: str) -> str:
        objective(name)
        return name

    @model_validator(mode="after")
    def _check_weights(self) -> "EagleSettings":
        check_position_weights(self.position_weights, self.step_decay, key="step_decay")
        return self


class Eagle(Drafter, kind="eagle", settings=EagleSettings):
    """Autoregressive head on the target's final hidden state; embedding and LM head are its."""

    grows_trees = True

    def __init__(
        self, settings: EagleSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the head in float32 or wider, on the target's device.

        Args:
            settings: see conf/drafter/eagle.yaml.
            target: the frozen target.
            vocab: rows of the target's head that drafts may say (FR-Spec, arXiv:2502.14856); None
                means all.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.averages_tokens = settings.normalise == "token"
        self.target = target
        self.vocab = vocab
        width = target.spec.hidden_size
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self.rope: Rope = rope_of(target, sizes.head_dim)
        self.fc = nn.Linear(2 * width, width, bias=settings.fc_bias)
        self.layers = nn.ModuleList(
            EagleLayer(sizes, is_first=False, norms_input=i > 0) for i in range(settings.num_layers)
        )
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)
        self.head = FrozenHead.of(target, vocab)

    @property
    def needs(self) -> FeatureRequest:
        """The final state: what the head continues, and what its law is compared with."""
        return FeatureRequest(wants_final=True)

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare own features, and the laws read off them, with the target's, depth by depth.

        Beyond depth 0 the head stands on its own earlier output as it does in a draft: HASS's
        harmonised context (arXiv:2408.15766, section 3.2). That output is taken as it is: no
        gradient flows from one depth into the one before.
        """
        assert features.final is not None
        steps = self._choices.hass_steps
        masks = torch.stack([batch.shifted_mask(s + 2) for s in range(steps)])
        rows = PickedRows.pick(masks.any(0))
        states = unroll(
            self._layers(),
            batch,
            self._noisy(features.final, batch, noise).to(self.fc.weight.dtype),
            rows,
            depths=steps,
            embed=self._embed,
            angles=self._angles,
            join=lambda embedded, hidden: self.fc(torch.cat([embedded, hidden], dim=-1)),
            feed=lambda hidden: (hidden, hidden.detach()),
        )
        predictions = Predictions.arrange(
            batch,
            masks,
            lead=2,
            dtype=torch.promote_types(self.fc.weight.dtype, torch.float32),
        )
        hidden = predictions.take(states, rows.place)
        predictions = weigh(
            predictions,
            batch,
            hidden,
            [self.head.rows],
            self.head.ids,
            decay=self._choices.step_decay,
            normalise=self._choices.normalise,
        )
        return self._compare(batch, features.final, predictions, hidden)

    def _compare(
        self,
        batch: TokenBatch,
        final: Float[Tensor, "B T D"],
        predictions: Predictions,
        hidden: Float[Tensor, "K N D"],
    ) -> DraftLoss:
        laws = score(
            objective(self._choices.objective),
            predictions,
            hidden,
            self.head,
            [self.head.rows],
            batch,
            final,
        )
        rows, judges = predictions.batch_rows, predictions.judges
        true = final[rows, judges]
        distances = torch.stack([smooth_l1(states, true) for states in hidden])
        distances = self._choices.feature_weight * distances.to(predictions.weights.dtype)
        shown = predictions.counts
        if self.head.kept is not None:
            shown = shown & judged_rows(batch.positions[rows, judges])
        return replace(
            laws,
            total=laws.total + (distances * predictions.weights).sum(),
            loss_sum=laws.loss_sum + (distances.detach() * shown).sum(1),
        )

    def _noisy(self, final: Tensor, batch: TokenBatch, noise: Noise) -> Tensor:
        if not self.training or self._choices.feature_noise == 0:
            return final
        drawn = noise.uniform(batch.sample_ids, final.shape[2], "feature_noise")
        return final + (2 * drawn - 1).to(final.dtype) * self._choices.feature_noise

    def _embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return self.target.embed(ids).detach().to(self.fc.weight.dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(positions)
        return cos, signed_sin(sin)

    def _layers(self) -> list[EagleLayer]:
        return [layer for layer in self.layers if isinstance(layer, EagleLayer)]

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HeadMemory:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        weight, has_bias = self.fc.weight, self._choices.fc_bias
        return open_memory(
            self._layers(),
            slots=slots,
            capacity=capacity,
            angles=self._angles(torch.arange(capacity + 1, device=weight.device)),
            ids=self.head.support(),
            fc=PackedLinear(weight.detach(), self.fc.bias.detach() if has_bias else None),
            head=self.head.packed(weight.dtype),
        )

    @torch.inference_mode()
    def observe(self, state: HeadMemory, seen: Observation) -> None:
        """Write keys and values by true features; keep the last position's own output."""
        assert seen.final is not None
        observe(state, seen, seen.final.to(self.fc.weight.dtype), self._feed)

    @torch.inference_mode()
    def propose(
        self, state: HeadMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft a chain, or the tree that the budget asks for."""
        draft = propose_chain if budget.tree is None else propose_tree
        return draft(state, budget, uniforms, self._feed)

    def static_rounds(self) -> StaticHead:
        """Give the methods of rounds that run on the device alone."""

        def features(state: HeadMemory, seen: Observation) -> Tensor:
            assert seen.final is not None
            return seen.final.to(self.fc.weight.dtype)

        return StaticHead(self._feed, features)

    @torch.inference_mode()
    def close(self, state: HeadMemory, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        close(state, rows)

    def _feed(
        self, state: HeadMemory, where: NewPositions, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        angles = state.cos[where.positions], state.sin[where.positions]
        joined = state.fc(torch.cat([self._embed(ids), hidden], dim=-1))
        out = decode_layers(self._layers(), state.layers, joined, joined, where, state.kv, angles)
        return out, state.head(out)

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the head without the target's embedding and LM head, which every engine shares."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        if self.vocab is not None:
            tensors["lm_head.weight"] = self.head.rows.detach()
            tensors["token_map"] = self.vocab.ids
        config = self.target.config
        return ServingWeights(
            architecture="eagle",
            config={
                "hidden_size": self.sizes.hidden,
                "intermediate_size": self.sizes.intermediate,
                "num_hidden_layers": self._choices.num_layers,
                "num_attention_heads": self.sizes.heads,
                "num_key_value_heads": self.sizes.kv_heads,
                "head_dim": self.sizes.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": self.sizes.eps,
                "rope_parameters": config.get("rope_parameters")
                or {"rope_type": "default", "rope_theta": 10000.0},
                "max_position_embeddings": self.target.spec.max_positions,
                "vocab_size": self.target.spec.vocab_size,
                "draft_vocab_size": None if self.vocab is None else self.vocab.size,
                "fc_bias": self._choices.fc_bias,
                "attention_bias": False,
                "tie_word_embeddings": False,
            },
            tensors=tensors,
        )
