"""DSpark: a block drafter whose tokens know the one before, and how sure it is (arXiv:2607.05147).

In: taps of the target and the anchor. Out: chains of draft tokens with a confidence each. One pass
gives every slot a hidden state; then a Markov head adds, slot by slot, what the token just drafted
says about the next: a table row and a matrix-vector product, no network. Slot k predicts the token
k + 1 after the anchor, so the anchor's own slot drafts as well.

The Markov head is rank r: the token before -> r numbers -> a change of the hidden state that the LM
head reads. For decoding and serving the latter two are one matrix over the vocabulary, so it costs
Vd * r a token; training needs neither that matrix nor logits of all tokens. Read first:
_block_backbone.py, then forward and propose.
"""

import dataclasses
from dataclasses import dataclass

import torch
from pydantic import NonNegativeFloat, PositiveInt, model_validator
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.drafters._block_backbone import BlockBackbone, BlockSettings, choose_anchors
from draftlab.drafters._block_loss import arrange_blocks, weigh_blocks
from draftlab.drafters._block_memory import BlockMemory
from draftlab.drafters._block_serving import backbone_config, backbone_tensors
from draftlab.drafters._depth_scores import Predictions, acceptances, score
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._growth import grow
from draftlab.drafters._one_pass import as_chain, depth_of, largest_probability
from draftlab.drafters._unrolling import PickedRows, sequence_sums
from draftlab.drafters.base import DraftBudget, Drafter, DraftLoss, Observation, ServingWeights
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import JUDGED_OF, DraftVocab, judged_rows
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.sampling import draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
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

    markov_rank: PositiveInt
    markov_table: bool
    confidence_weight: NonNegativeFloat

    @model_validator(mode="after")
    def _check_tokens(self) -> "DSparkSettings":
        self.check_depth(self.block_size)
        return self


@dataclass(slots=True)
class DSparkState:
    """Memory of the backbone, matrices as decoding applies them, and the ids they speak of."""

    memory: BlockMemory
    head: PackedLinear
    markov: PackedLinear
    ids: Int[Tensor, " C"]


class DSpark(Drafter, kind="dspark", settings=DSparkSettings):
    """A block drafter with a Markov head and a confidence head."""

    grows_trees = True

    def __init__(
        self, settings: DSparkSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the backbone; both small heads start without a say.

        Args:
            settings: see conf/drafter/dspark.yaml.
            target: the frozen target; embedding and LM head stay its own.
            vocab: the draft vocabulary; None means the target's whole one.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.averages_tokens = settings.normalise == "token"
        self.target = target
        self.vocab = vocab
        self.max_draft_tokens = settings.block_size
        self.backbone = BlockBackbone(settings, target)
        self._head = FrozenHead.of(target, vocab)
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
        self.to(self.backbone.dtype).to(target.device)

    @property
    def needs(self) -> FeatureRequest:
        """Taps for the backbone, the final state for the target's law."""
        return self.backbone.needs

    def _previous(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N r"]:
        """Reduce the token before a draft token to r numbers."""
        if self._choices.markov_table:
            return self.markov_in(ids)
        return self.markov_in(self.target.embed(ids).detach().to(self.backbone.dtype))

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare every slot with the target, given the true token before it."""
        taps, final = features.taps, features.final
        assert taps is not None
        assert final is not None
        choices, head = self._choices, self._head
        chosen = choose_anchors(batch, noise, choices.max_anchors)
        anchors = PickedRows.pick(chosen)
        blocks = self.backbone(batch, taps, anchors)
        predictions = arrange_blocks(batch, chosen, choices.block_size, blocks.dtype)
        hidden = predictions.take(blocks.unbind(2), anchors.place)
        # the token before token u + 1 is token u, whichever slot predicts it
        previous = self._previous(batch.input_ids[predictions.batch_rows, predictions.judges])
        corrected = hidden + self.markov_out(previous)
        predictions = weigh_blocks(choices, predictions, batch, corrected, head)
        loss = score(
            objective(choices.objective), predictions, corrected, head, [head.rows], batch, final
        )
        if self.confidence is None:
            return loss
        missed = self._confidence_loss(predictions, hidden, corrected, previous, batch, final)
        return dataclasses.replace(loss, total=loss.total + choices.confidence_weight * missed)

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
        del kv
        dtype, ids = self.backbone.dtype, self._head.support()
        return DSparkState(
            memory=BlockMemory(self.backbone, slots, capacity),
            head=self._head.packed(dtype),
            markov=fuse(self._markov_rows()[: ids.shape[0]].to(dtype)),
            ids=ids,
        )

    @torch.inference_mode()
    def observe(self, state: DSparkState, seen: Observation) -> None:
        """Write keys and values of true features."""
        state.memory.observe(seen)

    @torch.inference_mode()
    def propose(
        self, state: DSparkState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run one block, then choose token after token: each law knows the token before.

        In a tree that is the node's parent, so siblings' children differ in their laws.
        """
        rows = budget.rows
        depth = depth_of(budget, self._choices.block_size)
        hidden = state.memory.run(rows, depth if self._choices.causal else self._choices.block_size)
        base = state.head(hidden[:, :depth])
        num_nodes = state.memory.num_nodes(rows, depth)
        newest = state.memory.anchors[rows]
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
        law = budget.sampling.drafting if budget.draws else None
        tokens, laws, told = [], [], []
        for k in range(depth):
            previous = self._previous(newest)
            logits = base[:, k] + state.markov(previous)
            if budget.min_confidence is not None and self.confidence is not None:
                told.append(self._confidence_logits(hidden[:, k], previous).float().sigmoid())
            elif budget.min_confidence is not None:
                told.append(largest_probability(logits.unsqueeze(1), budget.sampling)[:, 0])
            if law is None:
                columns = greedy_ids(logits)
            else:
                laws.append(process(logits, law))
                columns = draw(laws[-1], uniforms[:, k])
            newest = state.ids[columns]
            tokens.append(newest)
        return as_chain(
            torch.stack(tokens, dim=1),
            torch.stack(laws, dim=1) if laws else None,
            state.ids,
            num_nodes,
            torch.stack(told, dim=1) if told else None,
        )

    @torch.inference_mode()
    def close(self, state: DSparkState, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        state.memory.close(rows)

    def _markov_rows(self) -> Float[Tensor, "C r"]:
        """Give what the Markov head adds to the logit of every draft token."""
        weight = self.markov_out.weight.detach()
        return self._head.rows.to(weight.dtype) @ weight

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the backbone and both heads; the Markov head as two tables over the vocabulary."""
        tensors = backbone_tensors(self.backbone) | self._head.serving_tensors()
        every = torch.arange(self.target.spec.vocab_size, device=self._head.rows.device)
        tensors["markov_in.weight"] = self._previous(every).detach()
        tensors["markov_out.weight"] = self._markov_rows()
        if self.confidence is not None:
            tensors["confidence.weight"] = self.confidence.weight.detach()
            tensors["confidence.bias"] = self.confidence.bias.detach()
        config = backbone_config(self.backbone, self._head) | {
            "sample_from_anchor": True,
            "markov_rank": self._choices.markov_rank,
            "has_confidence": self.confidence is not None,
        }
        return ServingWeights(architecture="dspark", config=config, tensors=tensors)
