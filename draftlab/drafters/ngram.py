"""Prompt lookup: what followed the last words the last time they were said.

In: the ids of the sequence. Out: the tokens after the most recent earlier occurrence of its last n
tokens, n from `max_ngram` down to `min_ngram`. No parameters, no hidden states, no training.

Every row keeps a dictionary from n-gram to the position that last followed it, so a round costs
a few dictionary look-ups, however long the sequence is.
"""

from dataclasses import dataclass, field

import torch
from pydantic import PositiveInt, model_validator

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DrafterSettings,
    DraftLoss,
    Observation,
    ServingWeights,
)
from draftlab.drafters.tree import DraftTree, chain_of_points
from draftlab.errors import ConfigError, NotExportable
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.view import TargetView


class NgramSettings(DrafterSettings):
    """Keys of conf/drafter/ngram.yaml.

    Attributes:
        max_ngram: longest run of last tokens to look for, tokens; tried first.
        min_ngram: shortest one, tokens.
    """

    max_ngram: PositiveInt
    min_ngram: PositiveInt

    @model_validator(mode="after")
    def _check_order(self) -> "NgramSettings":
        if self.min_ngram > self.max_ngram:
            raise ValueError(
                f"min_ngram={self.min_ngram} exceeds max_ngram={self.max_ngram}; expected "
                "1 <= min_ngram <= max_ngram"
            )
        return self


@dataclass(slots=True)
class _Text:
    """One sequence, anchor included, and where each of its n-grams was last followed."""

    ids: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class Ngram(Drafter, kind="ngram", settings=NgramSettings):
    """Copies from the sequence itself (prompt lookup); the honest baseline of every report."""

    def __init__(self, settings: NgramSettings, target: TargetView) -> None:
        """Keep the settings; there is nothing to build."""
        super().__init__()
        self.settings = settings
        self.target = target
        self._longest = settings.max_ngram
        self._shortest = settings.min_ngram

    @property
    def needs(self) -> FeatureRequest:
        """Ask for no hidden states."""
        return FeatureRequest()

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Refuse to train.

        Raises:
            ConfigError: always; there are no parameters.
        """
        raise ConfigError(
            "drafter kind 'ngram' has nothing to train; use it as it is: "
            "draftlab eval drafter=ngram"
        )

    def open(self, slots: int, capacity: int, kv: KVBuffers) -> list[_Text]:
        """Make empty texts."""
        return [_Text() for _ in range(slots)]

    def observe(self, state: list[_Text], seen: Observation) -> None:
        """Append tokens and index every n-gram that now has a follower."""
        # the one transfer of ids a round
        rows, lengths = seen.rows.tolist(), seen.lengths.tolist()
        ids, next_ids = seen.ids.tolist(), seen.next_ids.tolist()
        longest, shortest = self._longest, self._shortest
        for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length == 0:
                continue
            text = state[row]
            if not text.ids:
                text.ids.append(ids[r][0])
            for token in next_ids[r][:length]:
                here = len(text.ids)
                for n in range(shortest, min(longest, here) + 1):
                    text.after[tuple(text.ids[here - n :])] = here
                text.ids.append(token)

    def propose(
        self, state: list[_Text], budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Copy up to K tokens after the most recent match of the longest n-gram; none: no draft."""
        depth = budget.num_draft_tokens
        drafts = [self._look_up(state[row], depth) for row in budget.rows.tolist()]
        padded = [draft + [0] * (depth - len(draft)) for draft in drafts]
        device = budget.rows.device
        return chain_of_points(
            torch.tensor(padded, dtype=torch.int64, device=device),
            torch.tensor([len(draft) for draft in drafts], dtype=torch.int64, device=device),
        )

    def close(self, state: list[_Text], rows: Int[Tensor, " R"]) -> None:
        """Forget these rows."""
        for row in rows.tolist():
            state[row] = _Text()

    def serving_weights(self) -> ServingWeights:
        """Refuse: servers have prompt lookup built in.

        Raises:
            NotExportable: always, naming the server's own switch.
        """
        raise NotExportable(
            "drafter kind 'ngram' has no weights to export; servers have it built in, for vLLM: "
            f'--speculative-config \'{{"method": "ngram", "num_speculative_tokens": '
            f'{self.settings.num_draft_tokens}, "prompt_lookup_max": {self._longest}, '
            f'"prompt_lookup_min": {self._shortest}}}\''
        )

    def _look_up(self, text: _Text, depth: int) -> list[int]:
        length = len(text.ids)
        for n in range(min(self._longest, length), self._shortest - 1, -1):
            start = text.after.get(tuple(text.ids[length - n :]))
            if start is not None:
                draft = text.ids[start : start + depth]
                known = self.target.spec.num_token_ids
                # a prompt of raw ids may hold padding rows of the vocabulary: never proposed
                return next((draft[:i] for i, t in enumerate(draft) if t >= known), draft)
        return []
