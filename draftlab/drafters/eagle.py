"""EAGLE: a decoder layer that continues the target's last hidden state, read by the target's head.

In: the target's final hidden states and the tokens that followed. Out: chains or trees of draft
tokens; when training, a loss over `hass_steps` depths. Read first: Eagle, forward, then _feed.

Papers: EAGLE-1 arXiv:2401.15077; trees of EAGLE-2 arXiv:2406.16858 (`_growth.py`); training on own
output and the top-K loss of HASS arXiv:2408.15766.

Position j pairs feature j with the embedding of token j + 1 and predicts feature j + 1, which the
target's head reads as a law of token j + 2; which of these count: _self_fed_head.py.
"""

from dataclasses import replace
from typing import Any

import torch
from pydantic import NonNegativeFloat, PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._eagle_layer import EagleLayer, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import HeadMemory
from draftlab.drafters._self_fed_head import SelfFedHead
from draftlab.drafters._weighing import StepLossSettings
from draftlab.drafters._windows import check_window
from draftlab.drafters.base import DraftLoss, Observation, ServingWeights
from draftlab.drafters.layers import LayerSizes, angles_of, layer_config
from draftlab.drafters.vocab import DraftVocab, judged_rows
from draftlab.objectives.features import smooth_l1
from draftlab.randomness import Noise
from draftlab.shapes import Float, Tensor
from draftlab.targets.features import TargetFeatures
from draftlab.targets.view import TargetView


class EagleSettings(StepLossSettings):
    """Keys of conf/drafter/eagle.yaml.

    Attributes:
        num_layers: decoder layers of the head; the first has no norm before its attention.
        intermediate_size: width of its MLP; None means the target's.
        sliding_window: positions a row may look back to, itself included; None means all.
        fc_bias: a bias where embedding and feature are joined.
        hass_steps: depths trained, each on the head's own output; 1 is EAGLE-1, true features only.
        feature_weight: weight of the SmoothL1 distance to the target's next feature.
        feature_noise: half-width of uniform noise on the features while training.
    """

    num_layers: PositiveInt
    intermediate_size: PositiveInt | None
    sliding_window: PositiveInt | None
    fc_bias: bool
    hass_steps: PositiveInt
    feature_weight: NonNegativeFloat
    feature_noise: NonNegativeFloat

    @model_validator(mode="after")
    def _check_window(self) -> "EagleSettings":
        check_window(self.sliding_window, "hass_steps", self.hass_steps)
        return self


class Eagle(SelfFedHead[EagleSettings], kind="eagle", settings=EagleSettings):
    """Autoregressive head on the target's final hidden state; embedding and LM head are its."""

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
        super().__init__(settings, target, vocab)
        width = target.spec.hidden_size
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self._angles = angles_of(target, sizes.head_dim)
        self._window = settings.sliding_window
        self.fc = nn.Linear(2 * width, width, bias=settings.fc_bias)
        self.layers = nn.ModuleList(
            EagleLayer(sizes, is_first=False, norms_input=i > 0) for i in range(settings.num_layers)
        )
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)

    @property
    def _joiner(self) -> Any:
        return self.fc

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare own features, and the laws read off them, with the target's, depth by depth.

        Beyond depth 0 the head stands on its own earlier output as it does in a draft: HASS's
        harmonised context (arXiv:2408.15766, section 3.2). That output is taken as it is: no
        gradient flows from one depth into the one before.
        """
        assert features.final is not None
        choices = self._choices
        final = self._noisy(features.final, batch, noise, choices.feature_noise, "feature_noise")
        predictions, hidden = self._unroll(
            batch,
            final.to(self.dtype),
            choices.hass_steps,
            join=lambda embedded, hidden: self.fc(torch.cat([embedded, hidden], dim=-1)),
            feed=lambda hidden: (hidden, hidden.detach()),
        )
        return self._compare(batch, features.final, predictions, hidden)

    def _compare(
        self,
        batch: TokenBatch,
        final: Float[Tensor, "B T D"],
        predictions: Predictions,
        hidden: Float[Tensor, "K N D"],
    ) -> DraftLoss:
        laws = self._score(batch, final, predictions, hidden)
        rows, judges = predictions.batch_rows, predictions.judges
        true = final[rows, judges]
        distances = torch.stack([smooth_l1(states, true) for states in hidden])
        distances = self._choices.feature_weight * distances.to(predictions.weights.dtype)
        shown = predictions.counts
        if self._head.kept is not None:
            shown = shown & judged_rows(batch.positions[rows, judges])
        return replace(
            laws,
            total=laws.total + (distances * predictions.weights).sum(),
            loss_sum=laws.loss_sum + (distances.detach() * shown).sum(1),
        )

    # ---------------------------------------------------------------- decoding

    def _features(self, state: HeadMemory, seen: Observation) -> Tensor:
        assert seen.final is not None
        return seen.final.to(self.dtype)

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
        tensors = dict(self.state_dict())
        if self.vocab is not None:
            tensors["lm_head.weight"] = self._head.rows.detach()
            tensors["token_map"] = self.vocab.ids
        return ServingWeights(
            architecture="eagle",
            config=layer_config(self.sizes, self.target)
            | {
                "num_hidden_layers": self._choices.num_layers,
                "draft_vocab_size": None if self.vocab is None else self.vocab.size,
                "fc_bias": self._choices.fc_bias,
                "sliding_window": self._choices.sliding_window,
                "attention_bias": False,
                "tie_word_embeddings": False,
            },
            tensors=tensors,
        )
