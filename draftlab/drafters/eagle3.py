"""EAGLE-3: a small decoder layer that reads the target's hidden states and feeds back its own.

In: taps of the target and the tokens that followed. Out: chains of draft tokens; when training, a
loss over `unroll_steps` depths. Read first: Eagle3, forward, then propose.

Paper: arXiv:2503.01840; version 3.1 (norms on the taps, post-norm feedback) after arXiv:2605.09992.

Position j of the head pairs tap j with the embedding of token j + 1 and predicts token j + 2. At
depth s >= 1 there is no tap of position j + s yet, so the head's own output takes its place. Loss
rule: a prediction counts when the token *predicted* is learned (case O-06): row t at depth s counts
when token t + 2 + s is.
"""

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
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
from draftlab.drafters._warm_start import final_norm_weight, start_layers
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


class Eagle3Settings(DraftVocabSettings):
    """Keys of conf/drafter/eagle3.yaml.

    Attributes:
        tap_layers: taps to read, ascending; None means 2, L // 2 and L - 3.
        num_layers: decoder layers of the head.
        intermediate_size: width of its MLP; None means the target's.
        fc_norm: a norm for each tap before `fc`.
        norm_before_fc: one norm over all taps before `fc` instead.
        norm_output: feed back the state after the final norm.
        norm_before_residual: the residual is taken after the norm of the hidden half.
        train_head: an LM head of its own, started from the target's rows.
        unroll_steps: depths trained.
        position_weights: decay weighs depth s by step_decay ** s; d_pace by how likely it is
            reached.
        step_decay: for position_weights=decay, None otherwise.
        normalise: sequence gives every answer the same weight; token every token.
        objective: name of the loss, or a weighted sum of several.
        tap_noise: half-width of uniform noise on the taps while training.
        init_from_layer: 0-based target layer the head starts from; negative counts from the end.
        init_noise: half-width of the embedding half's uniform start, with `init_from_layer`.
    """

    tap_layers: tuple[int, ...] | None
    num_layers: PositiveInt
    intermediate_size: PositiveInt | None
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    train_head: bool
    unroll_steps: PositiveInt
    position_weights: PositionWeights
    step_decay: float | None = Field(gt=0, le=1)
    normalise: Normalise
    objective: str
    tap_noise: NonNegativeFloat
    init_from_layer: int | None
    init_noise: NonNegativeFloat

    @model_validator(mode="after")
    def _check_choices(self) -> "Eagle3Settings":
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one to false")
        if self.tap_layers is not None and not self.tap_layers:
            raise ValueError("tap_layers=[]: expected at least one tap, or null for the default")
        check_position_weights(self.position_weights, self.step_decay, key="step_decay")
        try:
            objective(self.objective)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class Eagle3(Drafter, kind="eagle3", settings=Eagle3Settings):
    """Autoregressive head on fused low, middle and high features of the target."""

    lm_head: Tensor
    grows_trees = True

    def __init__(
        self, settings: Eagle3Settings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the head in float32 or wider, on the target's device.

        Args:
            settings: see conf/drafter/eagle3.yaml.
            target: the frozen target; embedding and, unless `train_head`, LM head stay its own.
            vocab: the draft vocabulary; None means the target's whole one.

        Raises:
            ConfigError: taps the target does not have, or a layer that cannot start the head.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.averages_tokens = settings.normalise == "token"
        self.target = target
        self.vocab = vocab
        spec = target.spec
        width = spec.hidden_size
        taps = settings.tap_layers or default_taps(spec.num_layers)
        self._needs = FeatureRequest(taps, wants_final=True)
        self._needs.check(spec.num_layers)
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self.rope: Rope = rope_of(target, sizes.head_dim)

        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(width, sizes.eps) for _ in taps) if settings.fc_norm else None
        )
        self.input_norm = RMSNorm(len(taps) * width, sizes.eps) if settings.norm_before_fc else None
        self.layers = nn.ModuleList(
            EagleLayer(sizes, is_first=i == 0, norm_before_residual=settings.norm_before_residual)
            for i in range(settings.num_layers)
        )
        self.norm = RMSNorm(width, sizes.eps)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)
        if settings.init_from_layer is not None:
            self._start_from_target(settings.init_from_layer)

        self._target_head = head = FrozenHead.of(target, vocab)
        if settings.train_head:
            self.lm_head = nn.Parameter(head.rows.to(self.fc.weight.dtype, copy=True))
        else:
            self.register_buffer("lm_head", head.rows, persistent=False)

    @torch.no_grad()
    def _start_from_target(self, layer: int) -> None:
        """Start as a continuation of the target: its last tap, its layers, its final norm."""
        start_layers(self.layers, self.target, layer, embedding_noise=self._choices.init_noise)
        width = self.sizes.hidden
        self.fc.weight.zero_()
        self.fc.weight[:, -width:].fill_diagonal_(1.0)
        self.norm.weight.copy_(final_norm_weight(self.target))

    @property
    def needs(self) -> FeatureRequest:
        """Taps for the head, the final state for the target's law."""
        return self._needs

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Unroll the head over its own output and compare every depth with the target.

        Rows that no depth learns from skip everything but the keys others look at.
        """
        assert features.taps is not None
        assert features.final is not None
        steps = self._choices.unroll_steps
        masks = torch.stack([batch.shifted_mask(s + 2) for s in range(steps)])
        rows = PickedRows.pick(masks.any(0))
        states = unroll(
            self._layers(),
            batch,
            self._join(self._noisy(features.taps, batch, noise)),
            rows,
            depths=steps,
            embed=self._embed,
            angles=self._angles,
            join=lambda _, hidden: hidden,
            feed=self._feed_back,
        )
        predictions = Predictions.arrange(
            batch,
            masks,
            lead=2,
            dtype=torch.promote_types(self.fc.weight.dtype, torch.float32),
        )
        hidden, head = predictions.take(states, rows.place), self._target_head
        predictions = weigh(
            predictions,
            batch,
            hidden,
            [self.lm_head],
            head.ids,
            decay=self._choices.step_decay,
            normalise=self._choices.normalise,
        )
        loss = objective(self._choices.objective)
        return score(loss, predictions, hidden, head, [self.lm_head], batch, features.final)

    def _noisy(self, taps: Tensor, batch: TokenBatch, noise: Noise) -> Tensor:
        if not self.training or self._choices.tap_noise == 0:
            return taps
        drawn = noise.uniform(batch.sample_ids, taps.shape[2] * taps.shape[3], "tap_noise")
        return taps + (2 * drawn.view(taps.shape) - 1).to(taps.dtype) * self._choices.tap_noise

    def _join(
        self, taps: Float[Tensor, "B T L D"], packed: PackedLinear | None = None
    ) -> Float[Tensor, "B T D"]:
        """Fuse the taps of a position into one hidden state; decoding brings `fc` packed."""
        taps = taps.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            normed = [norm(taps[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            taps = torch.stack(normed, dim=-2)
        joined = taps.flatten(-2)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        fused = self.fc(joined) if packed is None else packed(joined)
        return fused.to(self.fc.weight.dtype)  # the residual stream keeps its precision

    def _embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return self.target.embed(ids).detach().to(self.fc.weight.dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(positions)
        return cos, signed_sin(sin)

    def _feed_back(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Give what the LM head reads, and what the next depth reads in a tap's place."""
        normed = self.norm(hidden)
        return normed, normed if self._choices.norm_output else hidden

    def _layers(self) -> list[EagleLayer]:
        return [layer for layer in self.layers if isinstance(layer, EagleLayer)]

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HeadMemory:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        weight, ids = self.fc.weight, self._target_head.support()
        return open_memory(
            self._layers(),
            slots=slots,
            capacity=capacity,
            angles=self._angles(torch.arange(capacity + 1, device=weight.device)),
            ids=ids,
            fc=fuse(weight),
            head=fuse(self.lm_head[: ids.shape[0]].to(weight.dtype)),  # padding rows come last
        )

    @torch.inference_mode()
    def observe(self, state: HeadMemory, seen: Observation) -> None:
        """Write keys and values by true taps; keep the last position's output for `propose`."""
        assert seen.taps is not None
        observe(state, seen, self._join(seen.taps, state.fc), self._feed)

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
            assert seen.taps is not None
            return self._join(seen.taps, state.fc)

        return StaticHead(self._feed, features)

    @torch.inference_mode()
    def close(self, state: HeadMemory, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        close(state, rows)

    def _feed(
        self, state: HeadMemory, where: NewPositions, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        angles = state.cos[where.positions], state.sin[where.positions]
        out = decode_layers(
            self._layers(), state.layers, self._embed(ids), hidden, where, state.kv, angles
        )
        normed, fed = self._feed_back(out)
        return fed, state.head(normed)

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the head under the names all engines share; layer ids count as our taps do."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        tensors.pop("lm_head", None)
        if self.vocab is not None or self._choices.train_head:
            tensors["lm_head.weight"] = self.lm_head.detach()
        size = self.target.spec.vocab_size
        if self.vocab is not None:
            size = self.vocab.size
            if size != self.vocab.target_vocab_size:
                tensors["d2t"] = self.vocab.d2t
                tensors["t2d"] = self.vocab.t2d
        config = self.target.config
        return ServingWeights(
            architecture="eagle3",
            config={
                "hidden_size": self.sizes.hidden,
                "target_hidden_size": self.target.spec.hidden_size,
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
                "draft_vocab_size": size,
                "tap_layers": list(self._needs.tap_layers),
                "fc_norm": self._choices.fc_norm,
                "norm_before_fc": self._choices.norm_before_fc,
                "norm_output": self._choices.norm_output,
                "norm_before_residual": self._choices.norm_before_residual,
                "attention_bias": False,
                "tie_word_embeddings": False,
            },
            tensors=tensors,
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Choose a low, a middle and a high tap: 2, L // 2, L - 3, as every server does by default.

    Below seven layers these would meet, so there: the first, the middle and the last.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))
