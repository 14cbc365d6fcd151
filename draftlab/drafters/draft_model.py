"""A draft model: a small causal language model of its own, distilled towards the target.

In: token ids alone. Out: K draft tokens, one forward pass each (arXiv:2211.17192, section 2). It
starts from any small model with the target's tokenizer, or from chosen layers of the target itself,
and learns the target's law at the same positions (forward KL by default, DistillSpec,
arXiv:2310.08461). It runs over KV buffers of its own through the same door as targets do.

Read `DraftModel.forward`, then `DraftModel.propose`.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftlab.data.batch import TokenBatch
from draftlab.drafters._weights import sequence_weights
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DrafterSettings,
    DraftLoss,
    Observation,
    ServingWeights,
)
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError, TargetMismatch, UnsupportedTarget
from draftlab.objectives.chunked import chunked_scores
from draftlab.objectives.named import objective
from draftlab.randomness import Noise, derive_seed
from draftlab.sampling import draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import HFDoor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.fast import FAMILIES
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.gate import admit
from draftlab.targets.model_view import ModelView
from draftlab.targets.spec import TargetSpec
from draftlab.targets.step import Step
from draftlab.targets.target import segment_ancestors
from draftlab.targets.view import TargetView

# tokens a row catches up in one pass at most; buffers are this much longer than the sequences, so
# that the padding columns of short rows have somewhere to go
_CHUNK = 64
_FINAL = FeatureRequest(wants_final=True)


class DraftModelSettings(DrafterSettings):
    """Keys of conf/drafter/draft_model.yaml.

    Attributes:
        start: layers copies chosen layers of the target; pretrained loads `model`.
        model: folder or hub name, for start=pretrained; None otherwise.
        revision: of a hub model; None is its main one.
        layers: the target's layers to start from, 0-based, for start=layers; None spreads a quarter
            of them evenly, first and last included.
        trainable: all weights; the decoder layers alone; or LoRA adapters on their matrices.
        lora_rank: rank of the adapters for trainable=lora, None otherwise.
        lora_alpha: the adapters count lora_alpha / lora_rank times; None otherwise.
        objective: name of the per-token loss, as in draftlab.objectives.
    """

    start: Literal["layers", "pretrained"]
    model: str | None
    revision: str | None
    layers: list[int] | None
    trainable: Literal["all", "layers", "lora"]
    lora_rank: PositiveInt | None
    lora_alpha: PositiveFloat | None
    objective: str

    @model_validator(mode="after")
    def _check_choices(self) -> "DraftModelSettings":
        if (self.start == "pretrained") != (self.model is not None):
            raise ValueError(
                f"model={self.model} with start={self.start}; expected a folder or hub name with "
                "start=pretrained, and null with start=layers"
            )
        if self.start == "pretrained" and self.layers is not None:
            raise ValueError(f"layers={self.layers} has no effect with start=pretrained; pass null")
        if self.revision is not None and self.model is None:
            raise ValueError(f"revision={self.revision} has no effect without a model; pass null")
        wants_lora = self.trainable == "lora"
        if {self.lora_rank is not None, self.lora_alpha is not None} != {wants_lora}:
            raise ValueError(
                f"lora_rank={self.lora_rank} and lora_alpha={self.lora_alpha} with trainable="
                f"{self.trainable}; expected both with trainable=lora, and null otherwise"
            )
        return self


@dataclass(slots=True)
class _Text:
    """One sequence as the draft model knows it.

    Attributes:
        ids: tokens, anchor included.
        written: tokens whose keys and values lie in the buffers; drafts of the last round may
            follow the true ones.
    """

    ids: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def settle(self) -> None:
        """Forget written tokens that turned out otherwise; the anchor is to be run again."""
        shared = 0
        for have, true in zip(self.written, self.ids[:-1], strict=False):
            if have != true:
                break
            shared += 1
        del self.written[shared:]


@dataclass(slots=True)
class DraftModelState:
    """Sequences and their keys and values."""

    texts: list[_Text]
    kv: KVBuffers


class _PassingKeys(KVBuffers):
    """Keys and values of the pass in progress alone, gradients and all: training has no past."""

    def __init__(self, slots: int, length: int) -> None:
        """Hold nothing."""
        self.slots = slots
        self.capacity = length

    def write(self, layer: int, flat: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep them until they are read."""
        self._now = (keys, values)

    def read(
        self, layer: int, rows: Tensor, live: int, *, is_prefix: bool
    ) -> tuple[Tensor, Tensor]:
        """Give back what was just written."""
        return self._now


class DraftModel(Drafter, kind="draft_model", settings=DraftModelSettings):
    """A causal language model that drafts token by token."""

    settings: DraftModelSettings

    def __init__(self, settings: DraftModelSettings, target: TargetView) -> None:
        """Load or build the model and check that it speaks the target's ids.

        Raises:
            TargetMismatch: another tokenizer, or too few rows for its ids.
            UnsupportedTarget: a model whose cache cannot be rolled back exactly.
        """
        super().__init__()
        self.settings = settings
        self.target = target
        self._objective = objective(settings.objective)
        self.model = _load(settings, target) if settings.model else _from_layers(settings, target)
        _choose_trainable(self.model, settings)
        self._door = HFDoor(self.model)
        self._view = ModelView(_spec_of(self._door, settings, target), target.tokenizer, self._door)
        admission = admit(self._door, self._view)
        if admission.kv_shape is None:
            raise UnsupportedTarget(
                f"draft model {self._view.spec.name} cannot draft: {admission.refusal}; choose "
                "another model"
            )
        self._kv_heads, self._head_dim = admission.kv_shape
        # casting a module casts its rotary table too, and bfloat16 positions are wrong ones
        self._tables = {n: b.clone() for n, b in self.model.named_buffers() if "inv_freq" in n}

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftModel":
        super()._apply(fn, recurse)
        for name, table in self._tables.items():
            buffer = self.model.get_buffer(name)
            buffer.data = table.to(buffer.device)
        return self

    @property
    def needs(self) -> FeatureRequest:
        """Ask for the final hidden state: the target's law is computed from it in training."""
        return _FINAL
