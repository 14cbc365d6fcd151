"""Medusa: K residual heads on the target's final hidden state (arXiv:2401.10774, section 2.1).

In: the final hidden state h_t of the last processed position. Out: head k (0-based) predicts token
t + 2 + k; token t + 1 is the anchor and known already. All heads read the same h_t, so their draft
tokens are independent of each other given it. No KV, no further forward passes: a tree costs what a
chain does. Which tree is best follows from how often each head is right with each of its choices;
`measure_ranks` counts that, and `best_tree` chooses (section 2.3.3).

Read `Medusa.forward` first, then `propose`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions, score
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._growth import best_static_tree, grow, num_levels, temperature_of
from draftlab.drafters._static import AlreadyStatic
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
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree, StaticTree, chain_parents
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.sampling import Sampling, SamplingRows, draw, greedy_ids, process
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView

_RANKS = 10  # choices of a head that are counted, as published trees have
_COUNTED_AT_ONCE = 256


class MedusaSettings(DraftVocabSettings):
    """Keys of conf/drafter/medusa.yaml.

    Attributes:
        num_heads: heads, at least `num_draft_tokens`.
        num_blocks: residual blocks of a head, each with weights of its own.
        head: own trains a Vd x D matrix a head, started from the target's; tied uses the target's
            frozen rows; low_rank trains D -> rank -> Vd, started from the best such approximation
            of the target's.
        head_rank: rank of `low_rank`, None otherwise.
        objective: name of the per-token loss, as in draftlab.objectives.
        position_weights: decay weighs head k by head_decay ** k; d_pace by how likely it is
            reached.
        head_decay: for position_weights=decay, None otherwise.
        normalise: sequence gives every answer the same weight; token every token.
    """

    num_heads: PositiveInt
    num_blocks: PositiveInt
    head: Literal["own", "tied", "low_rank"]
    head_rank: PositiveInt | None
    objective: str
    position_weights: PositionWeights
    head_decay: PositiveFloat | None
    normalise: Normalise

    @model_validator(mode="after")
    def _check_heads(self) -> "MedusaSettings":
        if self.num_heads < self.num_draft_tokens:
            raise ValueError(
                f"num_heads={self.num_heads} is below num_draft_tokens={self.num_draft_tokens}; "
                "expected a head for every draft token"
            )
        if (self.head == "low_rank") != (self.head_rank is not None):
            raise ValueError(
                f"head_rank={self.head_rank} with head={self.head}; expected a rank with "
                "head=low_rank, and null otherwise"
            )
        check_position_weights(self.position_weights, self.head_decay, key="head_decay")
        return self


@dataclass(slots=True)
class MedusaState:
    """The last final hidden state of every slot, and the matrices as decoding applies them.

    Attributes:
        hidden: updated in place.
        is_seen: False for slots that hold nothing yet.
        matrices: LM heads, one for all heads when tied.
    """

    hidden: Float[Tensor, "B D"]
    is_seen: Bool[Tensor, " B"]
    matrices: list[PackedLinear]


class ResidualBlocks(nn.Module):
    """x + SiLU(W x + b), a few times over; starts as the identity."""

    def __init__(self, width: int, count: int) -> None:
        """Make `count` blocks with weights of their own, all zero."""
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Refine hidden states."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class Medusa(Drafter, kind="medusa", settings=MedusaSettings):
    """K residual heads that read the target's final hidden state."""

    grows_trees = True
    rank_hits: Tensor
    # plain attributes: the target's weights are never parameters, never saved
    _tied_rows: Tensor | None

    def __init__(
        self, settings: MedusaSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the heads, started from the target's LM head."""
        super().__init__()
        self.settings = self._choices = settings
        self.target = target
        self.vocab = vocab
        self._objective = objective(settings.objective)
        self.max_draft_tokens = settings.num_heads
        width, count = target.spec.hidden_size, settings.num_heads
        self._head = head = FrozenHead.of(target, vocab)
        self._vocab_ids, rows = head.ids, head.rows
        self.averages_tokens = settings.normalise == "token"
        self.blocks = nn.ModuleList(
            ResidualBlocks(width, settings.num_blocks) for _ in range(count)
        )
        self._tied_rows = rows if settings.head == "tied" else None
        self.downs = nn.ModuleList()
        self.lm_heads = nn.ModuleList()
        if settings.head == "own":
            self.lm_heads.extend(_linear(rows) for _ in range(count))
        elif settings.head_rank is not None:
            down, up = _best_of_rank(rows, settings.head_rank)
            self.downs.extend(_linear(down) for _ in range(count))
            self.lm_heads.extend(_linear(up) for _ in range(count))

        # whole numbers, so that no change of dtype touches them; the last column counts all trials
        hits = torch.zeros(count, _RANKS + 1, dtype=torch.int64, device=target.device)
        self.register_buffer("rank_hits", hits)

    @property
    def needs(self) -> FeatureRequest:
        """Ask for the final hidden state."""
        return FeatureRequest(wants_final=True)

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Teach head k, at position t, what the target says at t + 1 + k of token t + 2 + k.

        Token by token: for each learned token, all heads that can predict it.
        """
        final = features.final
        assert final is not None, "`needs` asks for the final hidden state"
        masks = [batch.shifted_mask(2 + k) for k in range(self._choices.num_heads)]
        wide = torch.promote_types(_dtype_of(self.blocks), torch.float32)
        predictions = Predictions.arrange(batch, torch.stack(masks), lead=2, dtype=wide)
        rows = predictions.batch_rows
        hidden = torch.stack(
            [self._into_head(k, final[rows, t]) for k, t in enumerate(predictions.sources)]
        )
        matrices, head = self._matrices, self._head
        predictions = weigh(
            predictions,
            batch,
            hidden,
            matrices,
            head.ids,
            decay=self._choices.head_decay,
            normalise=self._choices.normalise,
        )
        return score(self._objective, predictions, hidden, head, matrices, batch, final)

    def open(self, slots: int, capacity: int, kv: KVBuffers) -> MedusaState:
        """Make room for one hidden state a slot."""
        device = self.target.device
        width = self.target.spec.hidden_size
        return MedusaState(
            hidden=torch.zeros(slots, width, dtype=self.target.dtype, device=device),
            is_seen=torch.zeros(slots, dtype=torch.bool, device=device),
            matrices=[fuse(matrix) for matrix in self._matrices],
        )

    def observe(self, state: MedusaState, seen: Observation) -> None:
        """Keep the hidden state of the last position of every row that has one."""
        assert seen.final is not None, "`needs` asks for the final hidden state"
        last = (seen.lengths - 1).clamp_min(0)
        newest = seen.final[torch.arange(last.shape[0], device=last.device), last]
        has_any = seen.lengths > 0
        state.hidden[seen.rows] = torch.where(
            has_any.unsqueeze(1), newest.to(state.hidden.dtype), state.hidden[seen.rows]
        )
        state.is_seen[seen.rows] |= has_any

    def propose(
        self, state: MedusaState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Let every head speak once; each is independent of the others given the hidden state."""
        depth = budget.num_draft_tokens if budget.tree is None else num_levels(budget.tree)
        if depth > self._choices.num_heads:
            what = "num_draft_tokens" if budget.tree is None else "depth of the tree"
            raise ConfigError(
                f"{what}={depth} is more than this Medusa drafter's "
                f"num_heads={self._choices.num_heads}; ask for at most that many"
            )
        logits = self._logits(state, budget.rows, depth)
        is_live = state.is_seen[budget.rows]
        if budget.tree is None:
            return self._chain(logits, is_live, budget, uniforms)
        later = iter(logits.unbind(1)[1:])
        return grow(
            budget,
            logits[:, 0],
            lambda columns, parents: next(later).unsqueeze(1),  # a head says the same to all nodes
            uniforms,
            law=self._law(budget),
            ids=self._vocab_ids,
            is_live=is_live,
        )

    def _chain(
        self, logits: Tensor, is_live: Tensor, budget: DraftBudget, uniforms: Tensor
    ) -> DraftTree:
        rows, depth, _ = logits.shape
        ids, confidence = self._vocab_ids, None
        if budget.min_confidence is not None:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            confidence = (wide / temperature_of(budget.sampling)).softmax(-1).max(-1).values
        if budget.draws:
            probs = process(logits, self._law(budget))
            columns = draw(probs, uniforms)
            support = None if ids is None else ids.expand(rows, depth, -1)
        else:
            columns = greedy_ids(logits)
            probs = torch.ones(rows, depth, 1, device=logits.device)
            support = (columns if ids is None else ids[columns]).unsqueeze(-1)
        return DraftTree(
            tokens=columns if ids is None else ids[columns],
            parents=chain_parents(rows, depth, columns.device),
            num_nodes=is_live * depth,
            law_probs=probs,
            law_ids=support,
            confidence=confidence,
        )

    def _law(self, budget: DraftBudget) -> Sampling | SamplingRows:
        """Draw as the target does where columns are target ids; else by the temperature alone."""
        sampling = budget.sampling
        return sampling.context_free if self._vocab_ids is None else sampling.drafting

    def static_rounds(self) -> AlreadyStatic:
        """Give the methods of rounds that run on the device alone."""
        return AlreadyStatic(self)

    @torch.no_grad()
    def measure_ranks(self, batches: Iterable[tuple[TokenBatch, TargetFeatures]]) -> None:
        """Count, over answers not trained on, which choice of each head was the target's own.

        Replaces what was counted before; the counts are saved with the heads.

        Args:
            batches: token rows and the target's features for them, as `needs` asks.
        """
        self.rank_hits.zero_()
        for batch, features in batches:
            assert features.final is not None, "`needs` asks for the final hidden state"
            final = features.final
            b, s = batch.shifted_mask(1).nonzero(as_tuple=True)
            for part in torch.arange(s.shape[0], device=s.device).split(_COUNTED_AT_ONCE):
                chosen = self.target.head(final[b[part], s[part]]).argmax(-1)
                for k in range(self._choices.num_heads):
                    self._count(k, final, batch.segment_ids, b[part], s[part], chosen)

    def _count(
        self, k: int, final: Tensor, segments: Tensor, b: Tensor, s: Tensor, chosen: Tensor
    ) -> None:
        source = s - 1 - k
        inside = (source >= 0) & (segments[b, source.clamp_min(0)] == segments[b, s])
        logits = self._logits_of(k, final[b[inside], source[inside]])
        best = logits.topk(min(_RANKS, logits.shape[-1]), dim=-1).indices
        best = best if self._vocab_ids is None else self._vocab_ids[best]
        hits = (best == chosen[inside].unsqueeze(1)).sum(0)
        self.rank_hits[k, : hits.shape[0]] += hits
        self.rank_hits[k, -1] += inside.sum()

    def best_tree(self, num_nodes: int) -> StaticTree:
        """Choose the tree that accepts most, by what `measure_ranks` counted.

        Raises:
            ConfigError: nothing was counted yet.
        """
        hits = self.rank_hits
        if not bool(hits[:, -1].any()):
            raise ConfigError(
                "these Medusa heads carry no counts of how often each choice is right, so there is "
                "no best tree; train with a validation split, or pass a tree of your own"
            )
        rates = hits[:, :-1] / hits[:, -1:].clamp_min(1)
        return best_static_tree(rates.tolist(), num_nodes)

    def close(self, state: MedusaState, rows: Int[Tensor, " R"]) -> None:
        """Forget these rows."""
        state.is_seen[rows] = False

    def serving_weights(self) -> ServingWeights:
        """Give blocks, full head matrices and, for a reduced vocabulary, the ids it holds."""
        ids, is_tied = self._vocab_ids, self._tied_rows is not None
        tensors = {name: w.detach() for name, w in self.blocks.named_parameters(prefix="blocks")}
        for k, matrix in enumerate(self._matrices):
            down = self.downs[k].get_parameter("weight").detach() if self.downs else None
            full = matrix.detach() if down is None else matrix.detach() @ down
            tensors["lm_head.weight" if is_tied else f"lm_heads.{k}.weight"] = full
        if ids is not None:
            tensors["token_map"] = ids
        config = {
            "num_heads": self._choices.num_heads,
            "num_blocks": self._choices.num_blocks,
            "hidden_size": self.target.spec.hidden_size,
            "vocab_size": self.target.spec.vocab_size,
            "has_bias": True,
            "has_shared_head": is_tied,
            "draft_vocab_size": None if ids is None else ids.shape[0],
        }
        return ServingWeights(architecture="medusa", config=config, tensors=tensors)

    @property
    def _matrices(self) -> list[Tensor]:
        if self._tied_rows is not None:
            return [self._tied_rows]
        return [head.get_parameter("weight") for head in self.lm_heads]

    def _into_head(self, k: int, hidden: Float[Tensor, "N D"]) -> Tensor:
        """Compute what the last matrix of head k multiplies."""
        blocks = self.blocks[k]
        refined = blocks(hidden.to(_dtype_of(blocks)))
        return self.downs[k](refined) if self.downs else refined

    def _logits(
        self, state: MedusaState, rows: Int[Tensor, " R"], depth: int
    ) -> Float[Tensor, "R N C"]:
        """Compute the first `depth` heads, without the ids that are no tokens."""
        hidden = state.hidden[rows]
        inner = torch.stack([self._into_head(k, hidden) for k in range(depth)], dim=1)
        inner = inner.to(self._matrices[0].dtype)
        if self._tied_rows is not None:
            return self._without_padding(state.matrices[0](inner))
        logits = torch.stack([state.matrices[k](inner[:, k]) for k in range(depth)], dim=1)
        return self._without_padding(logits)

    def _logits_of(self, k: int, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N C"]:
        """Compute head k with its weights as they are now."""
        matrix = self._matrices[k if len(self._matrices) > 1 else 0]
        return self._without_padding(self._into_head(k, hidden).to(matrix.dtype) @ matrix.T)

    def _without_padding(self, logits: Float[Tensor, "*N C"]) -> Float[Tensor, "*N C"]:
        if self.vocab is None:
            logits[..., self.target.spec.num_token_ids :].fill_(-torch.inf)
        return logits


def _linear(weight: Float[Tensor, "Do Di"]) -> nn.Linear:
    """A trainable float32 copy of a matrix, without bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def _best_of_rank(
    rows: Float[Tensor, "C D"], rank: int
) -> tuple[Float[Tensor, "r D"], Float[Tensor, "C r"]]:
    """Factor the best rank-r approximation: project on the r main directions of the rows."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if rank > wide.shape[1]:
        raise ConfigError(
            f"head_rank={rank} exceeds the target's hidden size {wide.shape[1]}; choose less, or "
            "head=own"
        )
    _, directions = torch.linalg.eigh(wide.T @ wide)  # ascending
    down = directions[:, -rank:].T
    return down, wide @ down.T


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype
