"""DSpark: a block drafter whose tokens know the one before, and how sure it is (arXiv:2607.05147).

In: taps of the target and the anchor. Out: chains of draft tokens with a confidence each. One pass
gives every slot a hidden state; then a Markov head adds, slot by slot, what the token just drafted
says about the next: a table row and a matrix-vector product, no network. Slot k predicts the token
k + 1 after the anchor, so the anchor's own slot drafts as well.

The Markov head is rank r: the token before -> r numbers -> a change of the hidden state that the LM
head reads. For decoding and serving the latter two are one matrix over the vocabulary, so it costs
Vd * r a token; training needs neither that matrix nor logits of all tokens. Read first:
_block_backbone.py, _block_drafter.py, then forward and propose.
"""

from dataclasses import dataclass, replace

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_backbone import BlockSettings
from draftlab.drafters._block_drafter import BlockDrafter, BlockState
from draftlab.drafters._chain import Chain, largest_probability
from draftlab.drafters._depth_scores import Predictions, acceptances
from draftlab.drafters._growth import grow
from draftlab.drafters._unrolling import sequence_sums
from draftlab.drafters.base import DraftBudget, DraftLoss, ServingWeights
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import JUDGED_OF, DraftVocab, judged_rows
from draftlab.randomness import Noise
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class DSparkSettings(BlockSettings):
    """Keys of conf/drafter/dspark.yaml.

    Attributes:
        markov_rank: r, numbers that the token before is reduced to.
        markov_table: a trained row of r numbers for every target id; False trains a projection of
            the target's embedding instead, which also knows tokens it has rarely met.
        confidence_weight: weight of the confidence head's loss; 0 makes no such head, and a node's
            confidence is its law's largest probability instead.
    """

    anchor_predicts = True
    markov_rank: PositiveInt
    markov_table: bool
    confidence_weight: NonNegativeFloat


@dataclass(slots=True)
class DSparkState(BlockState):
    """Beside a block's state, the Markov head as a matrix over the ids."""

    markov: PackedLinear


class DSpark(BlockDrafter[DSparkSettings], kind="dspark", settings=DSparkSettings):
    """A block drafter with a Markov head and a confidence head."""

    def __init__(
        self, settings: DSparkSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the backbone; both small heads start without a say."""
        super().__init__(settings, target, vocab)
        width, rank = target.spec.hidden_size, settings.markov_rank
        if settings.markov_table:
            self.markov_in = nn.Embedding(target.spec.vocab_size, rank)
            nn.init.normal_(self.markov_in.weight, std=0.02)
        else:
            self.markov_in = nn.Linear(width, rank, bias=False)
        self.markov_out = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.markov_out.weight)
        self.confidence = nn.Linear(width + rank, 1) if settings.confidence_weight > 0 else None
        if self.confidence is not None:
            nn.init.zeros_(self.confidence.weight)
            nn.init.zeros_(self.confidence.bias)
        self.to(self.dtype).to(target.device)

    def _previous(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N r"]:
        """Reduce the token before a draft token to r numbers."""
        return self.markov_in(ids if self._choices.markov_table else self._embed(ids))

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare every slot with the target, given the true token before it."""
        final = features.final
        assert final is not None
        predictions, hidden = self._predict(batch, features, noise)
        # the token before token u + 1 is token u, whichever slot predicts it
        previous = self._previous(batch.input_ids[predictions.batch_rows, predictions.judges])
        corrected = hidden + self.markov_out(previous)
        predictions = self._weigh(batch, predictions, corrected)
        loss = self._score(batch, final, predictions, corrected)
        if self.confidence is None:
            return loss
        missed = self._confidence_loss(predictions, hidden, corrected, previous, batch, final)
        return replace(loss, total=loss.total + self._choices.confidence_weight * missed)

    def _confidence_loss(
        self,
        predictions: Predictions,
        hidden: Float[Tensor, "K N D"],
        corrected: Float[Tensor, "K N D"],
        previous: Float[Tensor, "N r"],
        batch: TokenBatch,
        final: Float[Tensor, "B T D"],
    ) -> Float[Tensor, ""]:
        """Teach the acceptance to expect, sum_v min(p, q), at an eighth of the tokens.

        The whole target law is dear, and this head is small.
        """
        rows, judges = predictions.batch_rows, predictions.judges
        judged = judged_rows(batch.positions[rows, judges]).nonzero().squeeze(1)
        rows, judges = rows[judged], judges[judged]
        counts = predictions.counts[:, judged]
        wanted = acceptances(self._head, corrected[:, judged], final[rows, judges], counts)
        logits = self._confidence_logits(hidden[:, judged], previous[judged]).to(wanted.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        weights = predictions.weights[:, judged]
        if predictions.averages_tokens:  # so that they stand for all tokens, which they are few of
            return JUDGED_OF * (losses * weights).sum()
        sums = sequence_sums(batch.segment_ids, rows, judges, weights.sum(0))
        return (losses * weights / sums.clamp_min(torch.finfo(sums.dtype).tiny)).sum()

    def _confidence_logits(
        self, hidden: Float[Tensor, "*K N D"], previous: Float[Tensor, "N r"]
    ) -> Float[Tensor, "*K N"]:
        """Read off a slot and the token before it; the token of the slot itself is not known."""
        assert self.confidence is not None
        previous = previous.to(hidden.dtype).expand(*hidden.shape[:-1], -1)
        return self.confidence(torch.cat([hidden, previous], dim=-1)).squeeze(-1)

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> DSparkState:
        """Make buffers, rotary tables and fused matrices."""
        plain = super().open(slots, capacity, kv)
        markov = fuse(self._markov_rows()[: plain.ids.shape[0]].to(self.dtype))
        return DSparkState(plain.memory, plain.head, plain.ids, markov)

    @torch.inference_mode()
    def propose(
        self, state: DSparkState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run one block, then choose token after token: each law knows the token before.

        In a tree that is the node's parent, so siblings' children differ in their laws.
        """
        hidden, num_nodes = self._run(state, budget)
        base, depth = state.head(hidden), hidden.shape[1]
        newest = state.memory.anchors[budget.rows]
        if budget.tree is not None:
            depths = iter(range(1, depth))

            def expand(columns: Tensor, _: Tensor) -> Tensor:
                k = next(depths)
                return base[:, k : k + 1] + state.markov(self._previous(state.ids[columns]))

            return grow(
                budget,
                base[:, 0] + state.markov(self._previous(newest)),
                expand,
                uniforms,
                law=budget.sampling.drafting,
                ids=state.ids,
                is_live=num_nodes > 0,
            )
        chain = Chain(budget, uniforms, state.ids)
        told = []
        for k in range(depth):
            previous = self._previous(newest)
            logits = base[:, k] + state.markov(previous)
            if budget.min_confidence is not None and self.confidence is not None:
                told.append(self._confidence_logits(hidden[:, k], previous).float().sigmoid())
            elif budget.min_confidence is not None:
                told.append(largest_probability(logits.unsqueeze(1), budget.sampling)[:, 0])
            chain.choose(logits)
            newest = chain.newest
        return chain.finish(num_nodes, told)

    def _markov_rows(self) -> Float[Tensor, "C r"]:
        """Give what the Markov head adds to the logit of every draft token."""
        weight = self.markov_out.weight.detach()
        return self._head.rows.to(weight.dtype) @ weight

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the backbone and both heads; the Markov head as two tables over the vocabulary."""
        tensors = self._serving_tensors()
        every = torch.arange(self.target.spec.vocab_size, device=self._head.rows.device)
        tensors["markov_in.weight"] = self._previous(every).detach()
        tensors["markov_out.weight"] = self._markov_rows()
        if self.confidence is not None:
            tensors["confidence.weight"] = self.confidence.weight.detach()
            tensors["confidence.bias"] = self.confidence.bias.detach()
        config = self._serving_config() | {
            "markov_rank": self._choices.markov_rank,
            "has_confidence": self.confidence is not None,
        }
        return ServingWeights(architecture="dspark", config=config, tensors=tensors)
