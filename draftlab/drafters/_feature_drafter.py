"""What drafters that read the target's hidden states share: its frozen head, and how they learn.

Depth k of a row predicts one token, and learns what the target's own law says of it. Which rows
and depths there are is each drafter's own. Read FeatureDrafter.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions, score
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._weighing import LossSettings, weigh
from draftlab.drafters.base import Drafter, DraftLoss
from draftlab.drafters.vocab import DraftVocab
from draftlab.objectives.named import objective
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.features import FeatureRequest
from draftlab.targets.view import TargetView

S = TypeVar("S", bound=LossSettings)


class FeatureDrafter(Drafter, Generic[S], kind=None, settings=LossSettings):
    """A drafter on the target's features; embedding and LM head are the target's own."""

    grows_trees = True

    def __init__(
        self,
        settings: S,
        target: TargetView,
        vocab: DraftVocab | None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """Take the target's head.

        Args:
            settings: of the kind.
            target: the frozen target.
            vocab: rows of the target's head that drafts may say; None means all.
            taps: hidden states to read beside the final one, which gives the target's law.

        Raises:
            ConfigError: taps that the target does not have.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.averages_tokens = settings.normalise == "token"
        self.target = target
        self.vocab = vocab
        self._needs = FeatureRequest(taps, wants_final=True)
        self._needs.check(target.spec.num_layers)
        self._head = FrozenHead.of(target, vocab)

    @property
    def needs(self) -> FeatureRequest:
        """Taps, and the final state: for the target's law at least."""
        return self._needs

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def _matrices(self) -> Sequence[Float[Tensor, "C Dh"]]:
        """LM heads as training reads them: one for all depths, or one a depth."""
        return [self._head.rows]

    def _embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return self.target.embed(ids).detach().to(self.dtype)

    def _weigh(
        self, batch: TokenBatch, predictions: Predictions, hidden: Float[Tensor, "K N Dh"]
    ) -> Predictions:
        """Say what each prediction counts, as the settings ask."""
        return weigh(
            predictions,
            batch,
            hidden,
            self._matrices,
            self._head.ids,
            decay=self._choices.decay,
            normalise=self._choices.normalise,
        )

    def _score(
        self,
        batch: TokenBatch,
        final: Float[Tensor, "B T D"],
        predictions: Predictions,
        hidden: Float[Tensor, "K N Dh"],
    ) -> DraftLoss:
        """Compare weighed predictions with the target's law."""
        loss = objective(self._choices.objective)
        return score(loss, predictions, hidden, self._head, self._matrices, batch, final)
