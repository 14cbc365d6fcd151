"""Two drafters that share the work: one copies from the text, one has a network.

In: what the head asks for. Out: in every row the copy where it promises more tokens than the head
is known to give, else the head's draft (the hybrid of SuffixDecoding, arXiv:2411.04975). Where all
rows copy, the head does not run at all.

Non-anticipation: a copy and what it promises are functions of the row's tokens alone, and so is
the choice; the head's draft is made afterwards and never looked at. Whoever chose between two
drafts by looking at one that was *drawn* would change the law it was drawn from.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, NonNegativeFloat, SerializeAsAny

from draftlab.data.batch import TokenBatch
from draftlab.drafters._named import settings_by_name, settings_or_folder
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DrafterSettings,
    DraftLoss,
    Observation,
    ServingWeights,
    num_trainable,
)
from draftlab.drafters.store import build_drafter, load_drafter
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError, NotExportable
from draftlab.randomness import Noise
from draftlab.sampling import SamplingRows
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.view import TargetView


def _parse_model_free(value: Any) -> Any:
    return settings_by_name(value, "drafter.model_free")


def _parse_head(value: Any) -> Any:
    return settings_or_folder(value, "drafter.head")


class HybridSettings(DrafterSettings):
    """Keys of conf/drafter/hybrid.yaml.

    Attributes:
        model_free: settings of the drafter that copies; a kind's name stands for its yaml.
        head: settings of the drafter with a network, or the folder of a trained one; a run's name
            stands for its best checkpoint.
        head_accepts: draft tokens of the head's that a verify step accepts on average.
    """

    model_free: Annotated[SerializeAsAny[DrafterSettings], BeforeValidator(_parse_model_free)]
    head: Annotated[SerializeAsAny[DrafterSettings] | str, BeforeValidator(_parse_head)]
    head_accepts: NonNegativeFloat


@dataclass(slots=True)
class HybridState:
    """States of the two."""

    model_free: Any
    head: Any


class Hybrid(Drafter, kind="hybrid", settings=HybridSettings):
    """Copies where copies promise more; a head drafts elsewhere."""

    def __init__(self, settings: HybridSettings, target: TargetView) -> None:
        """Build the one and load or build the other; neither is trained here.

        Raises:
            ConfigError: a model-free drafter that has a network, or a head that must be trained.
            TargetMismatch: a head trained for another target.
        """
        super().__init__()
        self.settings = settings
        self.target = target
        self.model_free = build_drafter(settings.model_free, target)
        if num_trainable(self.model_free) or self.model_free.needs != FeatureRequest():
            raise ConfigError(
                f"drafter.model_free={self.model_free.kind} has a network; expected one that reads "
                "tokens alone, such as suffix or ngram"
            )
        self.head = _open_head(settings.head, target)
        self.head.requires_grad_(False)
        self._head_accepts = settings.head_accepts

    @property
    def needs(self) -> FeatureRequest:
        """Ask for what the head reads."""
        return self.head.needs

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Refuse to train.

        Raises:
            ConfigError: always; the head is trained by itself.
        """
        raise ConfigError(
            "drafter kind 'hybrid' has nothing to train; train the head by itself and pass "
            "drafter=hybrid drafter.head=RUN"
        )

    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HybridState:
        """Open both."""
        return HybridState(
            self.model_free.open(slots, capacity, kv), self.head.open(slots, capacity, kv)
        )

    def observe(self, state: HybridState, seen: Observation) -> None:
        """Show both what the target has processed, whoever drafted it."""
        self.model_free.observe(state.model_free, replace(seen, taps=None, final=None))
        self.head.observe(state.head, seen)

    def propose(
        self, state: HybridState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Copy in the rows where that promises more; let the head draft in the others."""
        copies = self._copy(state, budget, uniforms)
        takes_copy = (promised_tokens(copies) > self._head_accepts).tolist()
        others = [row for row, copied in enumerate(takes_copy) if not copied]
        if not others:
            return copies
        drafts = self._draft(state, budget, uniforms, others)
        if len(others) == len(takes_copy):
            return drafts
        return merge_rows(copies, drafts, others, self.target.spec.vocab_size)

    def close(self, state: HybridState, rows: Int[Tensor, " R"]) -> None:
        """Empty the slots of both."""
        self.model_free.close(state.model_free, rows)
        self.head.close(state.head, rows)

    def serving_weights(self) -> ServingWeights:
        """Refuse: what can be served is the head.

        Raises:
            NotExportable: always.
        """
        raise NotExportable(
            "drafter kind 'hybrid' has no serving format; it runs in draftlab's own decoder. Its "
            f"head ({self.head.kind}) may have one: draftlab export drafter=HEAD"
        )

    def _copy(
        self, state: HybridState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        depth = min(budget.num_draft_tokens, self.model_free.settings.num_draft_tokens)
        # points, whatever the sampling: nothing drawn may take part in the choice
        asked = replace(
            budget,
            num_draft_tokens=depth,
            points=True,
            min_confidence=budget.min_confidence or 0.0,
        )
        return self.model_free.propose(state.model_free, asked, uniforms[:, :depth])

    def _draft(
        self,
        state: HybridState,
        budget: DraftBudget,
        uniforms: Float[Tensor, "R N"],
        chosen: list[int],
    ) -> DraftTree:
        depth = min(budget.num_draft_tokens, self.head.settings.num_draft_tokens)
        depth = min(depth, self.head.max_draft_tokens or depth)
        index = torch.tensor(chosen, dtype=torch.int64, device=budget.rows.device)
        sampling = budget.sampling
        if isinstance(sampling, SamplingRows) and len(chosen) < len(sampling.laws):
            sampling = sampling.select(chosen)
        asked = replace(budget, rows=budget.rows[index], num_draft_tokens=depth, sampling=sampling)
        return self.head.propose(state.head, asked, uniforms[index, :depth])


def promised_tokens(copies: DraftTree) -> Float[Tensor, " R"]:
    """Compute how many tokens of each chain are expected to be accepted.

    A drafter without an opinion of its own is taken at its word: every token counts whole.
    """
    if copies.confidence is None:
        return copies.num_nodes.to(torch.float32)
    columns = torch.arange(copies.tokens.shape[1], device=copies.tokens.device)
    counts = columns < copies.num_nodes.unsqueeze(1)
    return torch.where(counts, copies.confidence, 0.0).cumprod(1).sum(1)


def merge_rows(
    copies: DraftTree, drafts: DraftTree, drafted: list[int], vocab_size: int
) -> DraftTree:
    """Put chains of two drafters into one tree, each node with its own law.

    Args:
        copies: point masses, every row.
        drafts: of the rows `drafted`, in that order, under any law.
        drafted: rows that take their draft.
        vocab_size: V.
    """
    device, rows = copies.tokens.device, copies.tokens.shape[0]
    width = max(copies.tokens.shape[1], drafts.tokens.shape[1])
    index = torch.tensor(drafted, dtype=torch.int64, device=device)
    tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
    tokens[:, : copies.tokens.shape[1]] = copies.tokens
    tokens[index] = 0
    own = drafts.tokens.shape[1]
    tokens[index, :own] = drafts.tokens
    num_nodes = copies.num_nodes.index_copy(0, index, drafts.num_nodes)
    tree = chain_of_points(tokens, num_nodes)
    support = drafts.law_probs.shape[2]
    if drafts.law_ids is None or support > 1:
        # a point mass among laws with a wider support: all other ids of that support weigh nothing
        probs = drafts.law_probs.new_zeros(rows, width, support)
        if drafts.law_ids is None:
            probs.scatter_(2, tokens.unsqueeze(-1), 1.0)
            law_ids = None
        else:
            probs[..., 0] = 1.0
            law_ids = (tokens.unsqueeze(-1) + torch.arange(support, device=device)) % vocab_size
            law_ids[index, :own] = drafts.law_ids
        probs[index, :own] = drafts.law_probs
        parents = chain_parents(rows, width, device)
        tree = DraftTree(tokens, parents, num_nodes, probs, law_ids)
    if copies.confidence is not None and drafts.confidence is not None:
        confidence = drafts.confidence.new_zeros(rows, width)
        confidence[:, : copies.confidence.shape[1]] = copies.confidence
        confidence[index] = 0.0
        confidence[index, :own] = drafts.confidence
        tree = replace(tree, confidence=confidence)
    return tree


def _open_head(head: DrafterSettings | str, target: TargetView) -> Drafter:
    if isinstance(head, str):
        return load_drafter(Path(head), target)
    drafter = build_drafter(head, target)
    # one that names a model of its own is useful as it is
    if num_trainable(drafter) and getattr(head, "model", None) is None:
        raise ConfigError(
            f"drafter.head={head.kind} is a kind that has to be trained; pass its run or folder: "
            f"draftlab train drafter={head.kind} makes one"
        )
    return drafter
