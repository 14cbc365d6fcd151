"""EAGLE-3: a small decoder layer that reads the target's hidden states and feeds back its own.

In: taps of the target and the tokens that followed. Out: chains of draft tokens; when training, a
loss over `unroll_steps` depths. Read first: Eagle3, forward, then propose.

Paper: arXiv:2503.01840; version 3.1 (norms on the taps, post-norm feedback) after arXiv:2605.09992.

Position j of the head pairs tap j with the embedding of token j + 1 and predicts token j + 2; what
stands for taps not known yet, and which predictions count: _self_fed_head.py.
"""

from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._eagle_layer import EagleLayer, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import HeadMemory
from draftlab.drafters._self_fed_head import SelfFedHead
from draftlab.drafters._taps import TapSettings, default_taps, side_by_side
from draftlab.drafters._warm_start import final_norm_weight, start_layers
from draftlab.drafters._windows import check_window
from draftlab.drafters.base import DraftLoss, Observation, ServingWeights
from draftlab.drafters.layers import LayerSizes, RMSNorm, angles_of, layer_config
from draftlab.drafters.vocab import DraftVocab
from draftlab.randomness import Noise
from draftlab.shapes import Float, Tensor
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class Eagle3Settings(TapSettings):
    """Keys of conf/drafter/eagle3.yaml.

    Attributes:
        fc_norm: a norm for each tap before `fc`.
        norm_before_fc: one norm over all taps before `fc` instead.
        norm_output: feed back the state after the final norm.
        norm_before_residual: the residual is taken after the norm of the hidden half.
        train_head: an LM head of its own, started from the target's rows.
        unroll_steps: depths trained.
        tap_noise: half-width of uniform noise on the taps while training.
        init_from_layer: 0-based target layer the head starts from; negative counts from the end.
        init_noise: half-width of the embedding half's uniform start, with `init_from_layer`.
    """

    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    train_head: bool
    unroll_steps: PositiveInt
    tap_noise: NonNegativeFloat
    init_from_layer: int | None
    init_noise: NonNegativeFloat

    @model_validator(mode="after")
    def _check_norms(self) -> "Eagle3Settings":
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one to false")
        check_window(self.sliding_window, "unroll_steps", self.unroll_steps)
        return self


class Eagle3(SelfFedHead[Eagle3Settings], kind="eagle3", settings=Eagle3Settings):
    """Autoregressive head on fused low, middle and high features of the target."""

    lm_head: Tensor

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
        taps = settings.tap_layers or default_taps(target.spec.num_layers)
        super().__init__(settings, target, vocab, taps)
        width = target.spec.hidden_size
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self._angles = angles_of(target, sizes.head_dim)
        self._window = settings.sliding_window

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

        rows = self._head.rows
        if settings.train_head:
            self.lm_head = nn.Parameter(rows.to(self.fc.weight.dtype, copy=True))
        else:
            self.register_buffer("lm_head", rows, persistent=False)

    @torch.no_grad()
    def _start_from_target(self, layer: int) -> None:
        """Start as a continuation of the target: its last tap, its layers, its final norm."""
        start_layers(self.layers, self.target, layer, embedding_noise=self._choices.init_noise)
        width = self.sizes.hidden
        self.fc.weight.zero_()
        self.fc.weight[:, -width:].fill_diagonal_(1.0)
        self.norm.weight.copy_(final_norm_weight(self.target))

    @property
    def _joiner(self) -> Any:
        return self.fc

    @property
    def _matrices(self) -> list[Tensor]:
        return [self.lm_head]

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Unroll the head over its own output and compare every depth with the target."""
        assert features.taps is not None
        assert features.final is not None
        taps = self._noisy(features.taps, batch, noise, self._choices.tap_noise, "tap_noise")
        predictions, hidden = self._unroll(
            batch,
            self._join(taps),
            self._choices.unroll_steps,
            join=lambda _, hidden: hidden,
            feed=self._feed_back,
        )
        return self._score(batch, features.final, predictions, hidden)

    def _join(
        self, taps: Float[Tensor, "B T L D"], packed: PackedLinear | None = None
    ) -> Float[Tensor, "B T D"]:
        """Fuse the taps of a position into one hidden state; decoding brings `fc` packed."""
        joined = side_by_side(taps.to(self.dtype), self.fc_norm)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        fused = self.fc(joined) if packed is None else packed(joined)
        return fused.to(self.dtype)  # the residual stream keeps its precision

    def _feed_back(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Give what the LM head reads, and what the next depth reads in a tap's place."""
        normed = self.norm(hidden)
        return normed, normed if self._choices.norm_output else hidden

    # ---------------------------------------------------------------- decoding

    def _features(self, state: HeadMemory, seen: Observation) -> Tensor:
        assert seen.taps is not None
        return self._join(seen.taps, state.fc)

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
        tensors = dict(self.state_dict()) | self._head.serving_tensors()
        tensors.pop("lm_head", None)
        if self.vocab is not None or self._choices.train_head:
            tensors["lm_head.weight"] = self.lm_head.detach()
        return ServingWeights(
            architecture="eagle3",
            config=layer_config(self.sizes, self.target)
            | {
                "num_hidden_layers": self._choices.num_layers,
                "target_hidden_size": self.target.spec.hidden_size,
                "draft_vocab_size": self._head.size,
                "tap_layers": list(self.needs.tap_layers),
                "fc_norm": self._choices.fc_norm,
                "norm_before_fc": self._choices.norm_before_fc,
                "norm_output": self._choices.norm_output,
                "norm_before_residual": self._choices.norm_before_residual,
                "sliding_window": self._choices.sliding_window,
                "attention_bias": False,
                "tie_word_embeddings": False,
            },
            tensors=tensors,
        )
