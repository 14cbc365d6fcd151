"""Medusa: K residual heads on the target's final hidden state (arXiv:2401.10774, section 2.1).

In: the final hidden state h_t of the last processed position. Out: head k (0-based) predicts token
t + 2 + k; token t + 1 is the anchor and known already. All heads read the same h_t, so their draft
tokens are independent of each other given it. No KV, no further forward passes: a tree costs what a
chain does. Which tree is best follows from how often each head is right with each of its choices;
`measure_ranks` counts that, and `best_tree` chooses (section 2.3.3).

Read `Medusa.forward` first, then `propose`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.drafters._chain import depth_of
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._feature_drafter import FeatureDrafter
from draftlab.drafters._growth import best_static_tree, grow, temperature_of
from draftlab.drafters._lm_heads import HeadsSettings, start_heads
from draftlab.drafters._static import AlreadyStatic
from draftlab.drafters.base import DraftBudget, DraftLoss, Observation, ServingWeights
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree, StaticTree, chain_parents
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import Sampling, SamplingRows, draw, greedy_ids, process
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView

_RANKS = 10  # choices of a head that are counted, as published trees have
_COUNTED_AT_ONCE = 256


class MedusaSettings(HeadsSettings):
    """Keys of conf/drafter/medusa.yaml."""


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


class Medusa(FeatureDrafter[MedusaSettings], kind="medusa", settings=MedusaSettings):
    """K residual heads that read the target's final hidden state."""

    rank_hits: Tensor

    def __init__(
        self, settings: MedusaSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the heads, started from the target's LM head."""
        super().__init__(settings, target, vocab)
        self.max_draft_tokens = settings.num_heads
        width, count = target.spec.hidden_size, settings.num_heads
        self.blocks = nn.ModuleList(
            ResidualBlocks(width, settings.num_blocks) for _ in range(count)
        )
        self.downs, self.lm_heads = start_heads(
            settings.head, settings.head_rank, count, self._head.rows, torch.float32
        )

        # whole numbers, so that no change of dtype touches them; the last column counts all trials
        hits = torch.zeros(count, _RANKS + 1, dtype=torch.int64, device=target.device)
        self.register_buffer("rank_hits", hits)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.blocks.parameters()).dtype

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Teach head k, at position t, what the target says at t + 1 + k of token t + 2 + k.

        Token by token: for each learned token, all heads that can predict it.
        """
        final = features.final
        assert final is not None, "`needs` asks for the final hidden state"
        masks = [batch.shifted_mask(2 + k) for k in range(self._choices.num_heads)]
        predictions = Predictions.arrange(batch, torch.stack(masks), lead=2, dtype=self.dtype)
        rows = predictions.batch_rows
        hidden = torch.stack(
            [self._into_head(k, final[rows, t]) for k, t in enumerate(predictions.sources)]
        )
        predictions = self._weigh(batch, predictions, hidden)
        return self._score(batch, final, predictions, hidden)

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
        depth = depth_of(budget, self._choices.num_heads)
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
            ids=self._head.ids,
            is_live=is_live,
        )

    def _chain(
        self, logits: Tensor, is_live: Tensor, budget: DraftBudget, uniforms: Tensor
    ) -> DraftTree:
        rows, depth, _ = logits.shape
        ids, confidence = self._head.ids, None
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
        return sampling.context_free if self._head.ids is None else sampling.drafting

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
        best = best if self._head.ids is None else self._head.ids[best]
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
        ids, is_tied = self._head.ids, self._choices.head == "tied"
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
    def _matrices(self) -> Sequence[Float[Tensor, "C Dh"]]:
        return [head.get_parameter("weight") for head in self.lm_heads] or super()._matrices

    def _into_head(self, k: int, hidden: Float[Tensor, "N D"]) -> Tensor:
        """Compute what the last matrix of head k multiplies."""
        refined = self.blocks[k](hidden.to(self.dtype))
        return self.downs[k](refined) if self.downs else refined

    def _logits(
        self, state: MedusaState, rows: Int[Tensor, " R"], depth: int
    ) -> Float[Tensor, "R N C"]:
        """Compute the first `depth` heads, without the ids that are no tokens."""
        hidden = state.hidden[rows]
        inner = torch.stack([self._into_head(k, hidden) for k in range(depth)], dim=1)
        inner = inner.to(self._matrices[0].dtype)
        if self._choices.head == "tied":
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
