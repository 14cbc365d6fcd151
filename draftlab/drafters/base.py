"""The contract every drafter keeps, and the way from a kind's name to its class.

A drafter is one file `draftlab/drafters/<kind>.py` and one yaml `conf/drafter/<kind>.yaml`; nothing
else names it. Read `Drafter` first.

How a round runs (decoding/decoder.py): `propose` -> the target verifies -> `observe` of the
accepted path. Prompts enter through `observe` as well, in chunks of any size.
"""

import importlib
import importlib.metadata
import importlib.util
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PositiveInt
from torch import nn

import draftlab.drafters
from draftlab.data.batch import TokenBatch
from draftlab.drafters.tree import DraftTree, DynamicTree, StaticTree
from draftlab.errors import ConfigError, NotExportable
from draftlab.randomness import Noise
from draftlab.sampling import Sampling, SamplingRows
from draftlab.settings.base import Settings
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.view import TargetView

if TYPE_CHECKING:
    from draftlab.drafters.adapters import Adapter


class DrafterSettings(Settings):
    """Keys every conf/drafter/*.yaml has.

    Attributes:
        kind: name of the drafter's file.
        num_draft_tokens: K, draft tokens a verify step; evaluation may choose another.
    """

    kind: str
    num_draft_tokens: PositiveInt


class DraftVocabSettings(DrafterSettings):
    """Settings of drafters that can predict over a reduced draft vocabulary.

    Attributes:
        draft_vocab_size: Vd, or None for the target's whole vocabulary.
    """

    draft_vocab_size: PositiveInt | None


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Loss of a batch, and per-depth sums that add up exactly over batches and ranks.

    Attributes:
        total: sum over the batch's sequences of each sequence's mean loss (long answers do not
            dominate). The trainer divides by the number of sequences of the effective batch. With
            `weight`, a weighted sum over the batch's predictions instead.
            Every prediction counts here; the sums below may be over a fixed part of them, since
            judging against the whole vocabulary is dear. Those that weigh nothing are in neither.
        loss_sum: per depth, unweighted sum of token losses.
        hit_sum: per depth, predictions whose argmax is the target's argmax over the *whole*
            vocabulary (case O-26).
        overlap_sum: per depth, sum of sum_v min(p, q): expected acceptance at temperature 1.
        count: per depth, number of predictions in these sums.
        weight: of drafters with `averages_tokens`, the sum of the weights in `total`; the trainer
            divides by that of the effective batch, so that the loss is a mean over predictions.
    """

    total: Float[Tensor, ""]
    loss_sum: Float[Tensor, " K"]
    hit_sum: Float[Tensor, " K"]
    overlap_sum: Float[Tensor, " K"]
    count: Float[Tensor, " K"]
    weight: Float[Tensor, ""] | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """A prompt chunk or an accepted path: positions whose target pass is done, in order.

    Consecutive observations of a slot are contiguous; a slot starts at position 0 after `open` or
    `close`.

    Attributes:
        rows: slots spoken of, unique.
        ids: token at each position, right-padded.
        lengths: positions that count, 0..W.
        next_ids: the token after each position: across a chunk's edge the first token of the next
            chunk, and at the end the anchor (the newest token, not yet run through the target).
        taps: as the drafter's `needs` asks, ascending; None when it asks for none.
        final: after the target's final norm; None when not asked for.
    """

    rows: Int[Tensor, " R"]
    ids: Int[Tensor, "R W"]
    lengths: Int[Tensor, " R"]
    next_ids: Int[Tensor, "R W"]
    taps: Float[Tensor, "R W L D"] | None
    final: Float[Tensor, "R W D"] | None


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """What a proposal may cost.

    Attributes:
        rows: slots to propose for, unique; the tree's R rows follow this order.
        num_draft_tokens: K, depth of the chain (or tree).
        sampling: temperature and filters the target is sampled with, for all rows or one a row. A
            drafter that `draws` does so from its own law at these temperatures, and must report
            that law.
        points: propose the likeliest tokens, each law a point mass, though the target is sampled.
        tree: shape of the proposal; None is a chain. Only for drafters with `grows_trees`.
        min_confidence: asks for `DraftTree.confidence`. A drafter may stop a row's chain before a
            node below this; the decoder cuts there in any case. 0 cuts nothing.
    """

    rows: Int[Tensor, " R"]
    num_draft_tokens: int
    sampling: Sampling | SamplingRows
    points: bool = False
    tree: StaticTree | DynamicTree | None = None
    min_confidence: float | None = None

    @property
    def draws(self) -> bool:
        """True: draw the tokens, siblings without replacement; False: the likeliest ones."""
        return not (self.points or self.sampling.is_greedy)


@dataclass(frozen=True, slots=True)
class ServingWeights:
    """What a drafter hands to export: neutral names, engine writers rename.

    Attributes:
        architecture: which network, such as "eagle3" or "medusa".
        config: sizes and switches that change the computation.
        tensors: name -> tensor, nothing of the target that the engine already has.
    """

    architecture: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]


class Drafter(nn.Module, ABC):
    """Proposes draft tokens for a frozen target; what is trainable in it is its parameters.

    A subclass says `class Ngram(Drafter, kind="ngram", settings=NgramSettings)` and is built as
    `Ngram(settings, target)`, or, when its settings are `DraftVocabSettings`, as
    `Eagle3(settings, target, vocab=DraftVocab | None)`. The `TargetView` is kept by reference: its
    weights are never parameters, never saved, never counted. Most that are trained stand on
    `_feature_drafter.FeatureDrafter`.

    `max_draft_tokens` is the deepest chain a drafter can propose, for those with a fixed number of
    heads or block places; None is any. `averages_tokens` says that every `DraftLoss` has a
    `weight`: the loss is a mean over predictions, not over sequences. `grows_trees` says that
    `propose` answers a budget with a `tree`. `adapter` is what `adapters.adapt` put beside its
    linear layers; to that end those are called in training, while LM heads, which may be read as
    matrices, are named lm_head(s). `folder` is where one that was opened by name was read from,
    for the record.

    Lossless decoding does not depend on a drafter being good, only on the law it reports being the
    law it drew from. What it proposes may depend on the prefix alone (non-anticipation).
    """

    kind: ClassVar[str]
    settings_class: ClassVar[type[DrafterSettings]]
    by_kind: ClassVar[dict[str, type["Drafter"]]] = {}
    settings: DrafterSettings
    target: TargetView
    max_draft_tokens: int | None = None
    averages_tokens: bool = False
    adapter: "Adapter | None" = None
    folder: Path | None = None
    grows_trees: ClassVar[bool] = False

    def __init_subclass__(cls, *, kind: str | None, settings: type[DrafterSettings]) -> None:
        """Record the kind, the same word as the file's name; None is a base that kinds share."""
        super().__init_subclass__()
        cls.settings_class = settings
        if kind is not None:
            cls.kind = kind
            Drafter.by_kind[kind] = cls

    @property
    @abstractmethod
    def needs(self) -> FeatureRequest:
        """Hidden states of the target that `forward` and `observe` read."""

    @abstractmethod
    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compute the training loss: the only training entry, called through the wrapper.

        Args:
            batch: token rows on the drafter's device.
            features: the target's hidden states as `needs` asks, for every position.
            noise: all randomness, keyed by (seed, epoch, sample id, purpose).
        """

    @abstractmethod
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> Any:
        """Make the state of `slots` empty sequences of at most `capacity` tokens each.

        Args:
            slots: sequences that may live at once.
            capacity: longest sequence, draft tokens included.
            kv: the target's own buffers for the same slots. Only a self-speculative drafter reads
                them, and it may write only past a row's committed length, where verification
                overwrites; an encoder-decoder draft reads the prompts kept beside them.
        """

    @abstractmethod
    def observe(self, state: Any, seen: Observation) -> None:
        """Take in positions the target has processed; any chunking gives the same state."""

    @abstractmethod
    def propose(self, state: Any, budget: DraftBudget, uniforms: Float[Tensor, "R N"]) -> DraftTree:
        """Propose draft tokens after the anchor of each row (the last `next_ids` it observed).

        Speculative entries of the state written here must not outlive the round.

        Args:
            state: made by `open`.
            budget: rows, depth, sampling.
            uniforms: numbers in [0, 1), one a node; the only randomness, unused when greedy.
        """

    @abstractmethod
    def close(self, state: Any, rows: Int[Tensor, " R"]) -> None:
        """Empty these slots, so that another sequence may enter them."""

    def best_tree(self, num_nodes: int) -> StaticTree:
        """Choose the static tree that accepts most, by what was counted while training.

        Raises:
            ConfigError: this kind counts nothing, or counted nothing yet.
        """
        del num_nodes
        raise ConfigError(
            f"a {self.kind} drafter has not counted how often each of its choices is right; pass "
            "decode.tree with kind static, dynamic or budgeted"
        )

    def serving_weights(self) -> ServingWeights:
        """Give the tensors and config a serving engine needs.

        Raises:
            NotExportable: no engine can serve this kind.
        """
        raise NotExportable(
            f"drafter kind {self.kind!r} has no serving format; it runs in draftlab's own decoder "
            "(draftlab generate, draftlab eval)"
        )


def drafter_kinds() -> list[str]:
    """List the known kinds without importing any: the files of this room, and entry points."""
    files = pkgutil.iter_modules(draftlab.drafters.__path__)
    own = [f.name for f in files if f.name not in _NOT_KINDS and not f.name.startswith("_")]
    plugins = [point.name for point in importlib.metadata.entry_points(group="draftlab.drafters")]
    return sorted({*own, *plugins})


_NOT_KINDS = frozenset({"adapters", "base", "tree", "vocab", "layers", "rope", "store"})


def drafter_class(kind: str) -> type[Drafter]:
    """Import the class of a kind.

    Raises:
        ConfigError: no such kind, with the known ones.
    """
    if kind not in Drafter.by_kind:
        for point in importlib.metadata.entry_points(group="draftlab.drafters"):
            if point.name == kind:
                point.load()
                break
        else:
            if kind not in drafter_kinds() and not _is_module(kind):
                raise ConfigError(
                    f"unknown drafter kind {kind!r}; known kinds: {', '.join(drafter_kinds())}"
                )
            importlib.import_module(f"draftlab.drafters.{kind}")
    return Drafter.by_kind[kind]


def _is_module(kind: str) -> bool:
    return kind.isidentifier() and importlib.util.find_spec(f"draftlab.drafters.{kind}") is not None


def num_trainable(drafter: Drafter) -> int:
    """Count trainable parameters."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)
