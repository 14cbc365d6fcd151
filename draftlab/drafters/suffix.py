"""Suffix decoding: drafts what most often followed the last words, as far as the match is long.

In: the ids of the sequence, and of answers finished earlier in the run. Out: a chain or a tree of
point drafts whose length grows with the match and whose score is how often each token followed
(SuffixDecoding, arXiv:2411.04975). No parameters, no hidden states, no training.

Every row has an automaton of its own over prompt and answer. Answers that finished before may be
kept in two more, shared by all rows, the older of which is dropped when the newer is full. What a
row drafts may then depend on its batch-mates, and so may the text that its random numbers give;
its law may not: drafts are point masses, and verification keeps the target's law whatever is
drafted. With `decode.rule=sampled_verify` not even the text depends on drafts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from draftlab.data.batch import TokenBatch
from draftlab.drafters._suffix_drafts import Branch, grow_chain, grow_dynamic, grow_static
from draftlab.drafters._suffix_index import SuffixIndex
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DrafterSettings,
    DraftLoss,
    Observation,
    ServingWeights,
)
from draftlab.drafters.tree import DraftTree, DynamicTree, StaticTree, chain_of_points
from draftlab.errors import ConfigError, NotExportable
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.view import TargetView


class SuffixSettings(DrafterSettings):
    """Keys of conf/drafter/suffix.yaml.

    Attributes:
        max_match_tokens: longest run of last tokens to look for.
        draft_per_match: draft tokens for every token that matches.
        min_path_probability: a draft ends where the product of its tokens' shares falls below this.
        num_global_tokens: tokens of earlier answers to keep; 0 looks in the sequence alone.
    """

    max_match_tokens: PositiveInt
    draft_per_match: PositiveFloat
    min_path_probability: float = Field(ge=0.0, le=1.0)
    num_global_tokens: NonNegativeInt


@dataclass(slots=True)
class _Text:
    """One sequence, anchor included.

    Attributes:
        index: counts its runs.
        ids: its tokens.
        answer_start: tokens there were when drafting began: the prompt.
    """

    index: SuffixIndex
    ids: list[int] = field(default_factory=list)
    answer_start: int | None = None


class _EarlierAnswers:
    """The newest answers up to a number of tokens, in two automata that take turns."""

    def __init__(self, depth: int, num_tokens: int) -> None:
        self._depth = depth
        self._room = max(1, num_tokens // 2)  # of each
        self._newer, self._older = SuffixIndex(depth), SuffixIndex(depth)
        self._held = 0

    def add(self, answer: Sequence[int]) -> None:
        answer = answer[-self._room :]
        if self._held + len(answer) > self._room:
            self._older, self._newer, self._held = self._newer, SuffixIndex(self._depth), 0
        self._newer.start()
        for token in answer:
            self._newer.append(token)
        self._held += len(answer)

    def indices(self) -> tuple[SuffixIndex, SuffixIndex]:
        return self._newer, self._older


@dataclass(slots=True)
class SuffixState:
    """Texts by slot, and what earlier answers said (None when none are kept)."""

    texts: list[_Text]
    earlier: _EarlierAnswers | None


class Suffix(Drafter, kind="suffix", settings=SuffixSettings):
    """Copies what most often followed, in the sequence itself and in earlier answers."""

    grows_trees = True

    def __init__(self, settings: SuffixSettings, target: TargetView) -> None:
        """Keep the settings; there is nothing to build."""
        super().__init__()
        self.settings = settings
        self.target = target
        self._choices = settings
        self._most = settings.max_match_tokens
        # counts are read for a match and the draft after it
        self._depth = self._most + max(1, int(settings.draft_per_match * self._most))

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
            "drafter kind 'suffix' has nothing to train; use it as it is: "
            "draftlab eval drafter=suffix"
        )

    def open(self, slots: int, capacity: int, kv: KVBuffers) -> SuffixState:
        """Make empty texts; earlier answers are those of this state alone."""
        kept = self._choices.num_global_tokens
        return SuffixState(
            [_Text(SuffixIndex(self._depth)) for _ in range(slots)],
            _EarlierAnswers(self._depth, kept) if kept else None,
        )

    def observe(self, state: SuffixState, seen: Observation) -> None:
        """Append tokens and count them."""
        # the one transfer of ids a round
        rows, lengths = seen.rows.tolist(), seen.lengths.tolist()
        ids, next_ids = seen.ids.tolist(), seen.next_ids.tolist()
        for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if length == 0:
                continue
            text = state.texts[row]
            fresh = next_ids[r][:length]
            if not text.ids:
                fresh = [ids[r][0], *fresh]
            for token in fresh:
                text.index.append(token)
            text.ids += fresh

    def propose(
        self, state: SuffixState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft what the best-scoring match promises; nothing where no run was seen before."""
        branches = []
        for row in budget.rows.tolist():
            text = state.texts[row]
            if text.ids and text.answer_start is None:
                text.answer_start = len(text.ids)
            branches.append(self._best(state, text, budget))
        return _as_tree(branches, budget)

    def close(self, state: SuffixState, rows: Int[Tensor, " R"]) -> None:
        """Forget these rows, but for what they answered where answers are kept."""
        for row in rows.tolist():
            text = state.texts[row]
            if state.earlier is not None and text.answer_start is not None:
                state.earlier.add(text.ids[text.answer_start :])
            state.texts[row] = _Text(SuffixIndex(self._depth))

    def serving_weights(self) -> ServingWeights:
        """Refuse: servers have suffix decoding built in.

        Raises:
            NotExportable: always, naming the server's own switch.
        """
        raise NotExportable(
            "drafter kind 'suffix' has no weights to export; servers have it built in, for vLLM: "
            f'--speculative-config \'{{"method": "suffix", "num_speculative_tokens": '
            f'{self.settings.num_draft_tokens}, "suffix_decoding_max_tree_depth": {self._depth}, '
            f'"suffix_decoding_max_spec_factor": {self._choices.draft_per_match}, '
            f'"suffix_decoding_min_token_prob": {self._choices.min_path_probability}}}\''
        )

    def _best(self, state: SuffixState, text: _Text, budget: DraftBudget) -> Branch:
        """Grow a draft from every match and keep the one most tokens are expected of."""
        best = Branch()
        for index, matches in self._matches(state, text):
            for place, matched in matches:
                length = int(self._choices.draft_per_match * matched)
                length = min(length, budget.num_draft_tokens)
                if length <= best.score:  # a draft's score is at most its length
                    break
                branch = self._grow(index, place, length, budget)
                if branch.score > best.score:
                    best = branch
        return best

    def _matches(
        self, state: SuffixState, text: _Text
    ) -> Iterator[tuple[SuffixIndex, Iterator[tuple[int, int]]]]:
        yield text.index, text.index.matches(self._most)
        if state.earlier is not None:
            for index in state.earlier.indices():
                yield index, index.find(text.ids[-self._most :])

    def _grow(self, index: SuffixIndex, place: int, length: int, budget: DraftBudget) -> Branch:
        floor, known = self._choices.min_path_probability, self.target.spec.num_token_ids
        shape = budget.tree
        if isinstance(shape, StaticTree):
            return grow_static(index, place, shape, length=length, floor=floor, known=known)
        if isinstance(shape, DynamicTree):
            return grow_dynamic(index, place, shape, length=length, floor=floor, known=known)
        sure = budget.min_confidence or 0.0
        return grow_chain(index, place, length=length, floor=floor, sure=sure, known=known)


def _as_tree(branches: list[Branch], budget: DraftBudget) -> DraftTree:
    """Give branches of several rows as one tree of point masses."""
    shape, device = budget.tree, budget.rows.device
    if shape is None:
        width = budget.num_draft_tokens
    else:
        width = len(shape.parents) if isinstance(shape, StaticTree) else shape.num_nodes

    def padded(rows: list[list[int]] | list[list[float]], filling: int | float) -> Tensor:
        return torch.tensor([r + [filling] * (width - len(r)) for r in rows], device=device)

    counts = torch.tensor([len(branch.tokens) for branch in branches], device=device)
    tree = chain_of_points(padded([branch.tokens for branch in branches], 0), counts)
    if shape is not None:
        tree = replace(tree, parents=padded([branch.parents for branch in branches], -1))
    if budget.min_confidence is not None:
        tree = replace(tree, confidence=padded([branch.shares for branch in branches], 0.0))
    return tree
