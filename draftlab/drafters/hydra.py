"""Hydra: heads on the target's final state that also see the tokens drafted so far.

In: the final hidden state h_t and the embeddings of the tokens after it. Out: head k (0-based)
predicts token t + 2 + k from [h_t, e(t+1), ..., e(t+1+k)]; token t + 1 is the anchor (Hydra,
arXiv:2402.05109, section 3). Heads run one after another, so a draft is a chain or a tree whose
nodes know their ancestors. `prefix_attention` puts one decoder layer over all final states in place
of h_t (Hydra++, section 4). Distilled from the target's law.

Read `SequentialHead` first, then `Hydra.forward`.
"""

from dataclasses import dataclass

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions, score
from draftlab.drafters._eagle_layer import EagleLayer, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import HeadMemory, close, observe, open_memory
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.drafters._growth import grow, num_levels, temperature_of
from draftlab.drafters._lm_heads import HeadForm, LMHeads
from draftlab.drafters._unrolling import PickedRows, unroll
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
)
from draftlab.drafters.layers import LayerSizes, Rope, fuse, rope_of, signed_sin
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.sampling import draw, greedy_ids, process
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class HydraSettings(DraftVocabSettings):
    """Keys of conf/drafter/hydra.yaml.

    Attributes:
        num_heads: heads, at least `num_draft_tokens`.
        num_blocks: MLP layers of a head; the first joins state and embeddings.
        prefix_attention: a decoder layer over the final states before the heads.
        head: own trains a Vd x D matrix a head, started from the target's; tied uses the target's
            frozen rows; low_rank trains D -> rank -> Vd.
        head_rank: rank of `low_rank`, None otherwise.
        objective: name of the per-token loss, as in draftlab.objectives.
        position_weights: decay weighs head k by head_decay ** k; d_pace by how likely it is
            reached.
        head_decay: for position_weights=decay, None otherwise.
        normalise: sequence gives every answer the same weight; token every token.
    """

    num_heads: PositiveInt
    num_blocks: PositiveInt
    prefix_attention: bool
    head: HeadForm
    head_rank: PositiveInt | None
    objective: str
    position_weights: PositionWeights
    head_decay: PositiveFloat | None
    normalise: Normalise

    @model_validator(mode="after")
    def _check_heads(self) -> "HydraSettings":
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
        try:
            objective(self.objective)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class SequentialHead(nn.Module):
    """An MLP over [state, embeddings of the tokens so far]; starts as the state itself.

    The first layer has a linear way past it, the further ones the plain one.
    """

    def __init__(self, width: int, num_tokens: int, num_blocks: int) -> None:
        """Make a head that reads `num_tokens` embeddings, with weights of its own in each layer."""
        super().__init__()
        joined = width * (1 + num_tokens)
        self.skip = nn.Linear(joined, width)
        self.first = nn.Linear(joined, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks - 1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            self.skip.weight[:, :width].fill_diagonal_(1.0)

    def forward(self, joined: Float[Tensor, "*N In"]) -> Float[Tensor, "*N D"]:
        """Refine the state."""
        hidden = self.skip(joined) + F.silu(self.first(joined))
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


@dataclass(slots=True)
class HydraState:
    """What the heads read next, slot by slot.

    Attributes:
        hidden: state of the last position, behind the prefix layer where there is one.
        anchors: the token after it.
        is_seen: False for slots that hold nothing yet.
        matrices: LM heads as decoding applies them, one for all when tied.
        prefix: keys and values of the prefix layer; None without one.
    """

    hidden: Float[Tensor, "B D"]
    anchors: Int[Tensor, " B"]
    is_seen: Bool[Tensor, " B"]
    matrices: list[PackedLinear]
    prefix: HeadMemory | None


class Hydra(Drafter, kind="hydra", settings=HydraSettings):
    """K sequential heads on the target's final hidden state."""

    grows_trees = True

    def __init__(
        self, settings: HydraSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the heads in float32 or wider, started from the target's LM head."""
        super().__init__()
        self.settings = self._choices = settings
        self.target = target
        self.vocab = vocab
        self._objective = objective(settings.objective)
        self.averages_tokens = settings.normalise == "token"
        self.max_draft_tokens = settings.num_heads
        width, count = target.spec.hidden_size, settings.num_heads
        self._head = FrozenHead.of(target, vocab)
        self.heads = nn.ModuleList(
            SequentialHead(width, 1 + k, settings.num_blocks) for k in range(count)
        )
        self.lm_heads = LMHeads(settings.head, settings.head_rank, count, self._head.rows)
        self.prefix: EagleLayer | None = None
        if settings.prefix_attention:
            sizes = LayerSizes.of(target.config)
            self.rope: Rope = rope_of(target, sizes.head_dim)
            self.prefix = EagleLayer(sizes, is_first=False)
            # adds nothing yet, so that heads start from the final state
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)

    @property
    def needs(self) -> FeatureRequest:
        """Ask for the final hidden state."""
        return FeatureRequest(wants_final=True)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.heads.parameters()).dtype

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Teach head k, at position t, what the target says at t + 1 + k of token t + 2 + k.

        The tokens in between are the data's own.
        """
        final = features.final
        assert final is not None, "`needs` asks for the final hidden state"
        count = self._choices.num_heads
        masks = torch.stack([batch.shifted_mask(2 + k) for k in range(count)])
        predictions = Predictions.arrange(
            batch,
            masks,
            lead=2,
            dtype=torch.promote_types(self._dtype, torch.float32),
        )
        states, places = self._states(batch, final.to(self._dtype), masks)
        b = predictions.batch_rows
        last = batch.input_ids.shape[1] - 1
        inner = []
        for k, source in enumerate(predictions.sources):
            ids = [batch.input_ids[b, (source + 1 + j).clamp_max(last)] for j in range(1 + k)]
            embedded = self._embed(torch.stack(ids, dim=1)).flatten(1)
            joined = torch.cat([states[b, places[b, source].clamp_min(0)], embedded], dim=-1)
            inner.append(self.lm_heads.into(k, self.heads[k](joined)))
        hidden, matrices = torch.stack(inner), self.lm_heads.matrices
        predictions = weigh(
            predictions,
            batch,
            hidden,
            matrices,
            self._head.ids,
            decay=self._choices.head_decay,
            normalise=self._choices.normalise,
        )
        return score(self._objective, predictions, hidden, self._head, matrices, batch, final)

    def _states(
        self, batch: TokenBatch, final: Float[Tensor, "B T D"], masks: Bool[Tensor, "K B T"]
    ) -> tuple[Float[Tensor, "B A D"], Int[Tensor, "B T"]]:
        """Give the state of every trained position, and where it lies."""
        if self.prefix is None:
            width = batch.input_ids.shape[1]
            everywhere = torch.arange(width, device=final.device).expand_as(batch.input_ids)
            return final, everywhere
        rows = PickedRows.pick(masks.any(0))
        (states,) = unroll(
            [self.prefix],
            batch,
            final,
            rows,
            depths=1,
            embed=lambda _: final,  # the layer reads the state alone
            angles=self._angles,
            join=lambda _, hidden: hidden,
            feed=lambda hidden: (hidden, hidden),
        )
        return states, rows.place

    def _embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return self.target.embed(ids).detach().to(self._dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(positions)
        return cos, signed_sin(sin)

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HydraState:
        """Make room for one state a slot and, with prefix attention, for its keys and values."""
        del kv
        width, device = self.target.spec.hidden_size, self.target.device
        memory = None
        if self.prefix is not None:
            nothing = fuse(torch.zeros(1, width, dtype=self._dtype, device=device))
            memory = open_memory(
                [self.prefix],
                slots=slots,
                capacity=capacity,
                angles=self._angles(torch.arange(capacity + 1, device=device)),
                ids=torch.zeros(1, dtype=torch.int64, device=device),
                fc=nothing,
                head=nothing,
            )
        known = self._head.support().shape[0]  # padding rows come last
        return HydraState(
            hidden=torch.zeros(slots, width, dtype=self._dtype, device=device),
            anchors=torch.zeros(slots, dtype=torch.int64, device=device),
            is_seen=torch.zeros(slots, dtype=torch.bool, device=device),
            matrices=[fuse(m[:known].to(self._dtype)) for m in self.lm_heads.matrices],
            prefix=memory,
        )

    @torch.inference_mode()
    def observe(self, state: HydraState, seen: Observation) -> None:
        """Keep the state of the last position of every row that has one, and its anchor."""
        assert seen.final is not None, "`needs` asks for the final hidden state"
        final = seen.final.to(self._dtype)
        rows, last = seen.rows, (seen.lengths - 1).clamp_min(0)
        if state.prefix is None:
            newest = final[torch.arange(rows.shape[0], device=rows.device), last]
        else:
            observe(state.prefix, seen, final, self._feed_prefix)
            newest = state.prefix.hidden[rows]
        has_any = seen.lengths > 0
        anchors = seen.next_ids.gather(1, last.unsqueeze(1))[:, 0]
        state.hidden[rows] = torch.where(has_any.unsqueeze(1), newest, state.hidden[rows])
        state.anchors[rows] = torch.where(has_any, anchors, state.anchors[rows])
        state.is_seen[rows] |= has_any

    def _feed_prefix(
        self, memory: HeadMemory, where: NewPositions, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self.prefix is not None
        angles = memory.cos[where.positions], memory.sin[where.positions]
        out = decode_layers([self.prefix], memory.layers, hidden, hidden, where, memory.kv, angles)
        return out, out[..., :1]  # nobody reads logits here: the heads come later

    @torch.inference_mode()
    def propose(
        self, state: HydraState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run head after head, each on the tokens of those before it.

        Raises:
            ConfigError: a deeper draft than there are heads.
        """
        depth = budget.num_draft_tokens if budget.tree is None else num_levels(budget.tree)
        if depth > self._choices.num_heads:
            raise ConfigError(
                f"num_draft_tokens={depth} is more than this Hydra drafter's "
                f"num_heads={self._choices.num_heads}; ask for at most that many"
            )
        ids, rows = self._head.support(), budget.rows
        joined = torch.cat([state.hidden[rows], self._embed(state.anchors[rows])], dim=-1)
        joined, level = joined.unsqueeze(1), 0

        def expand(columns: Tensor, parents: Tensor) -> Tensor:
            nonlocal joined, level
            above = joined.gather(1, parents.unsqueeze(-1).expand(-1, -1, joined.shape[2]))
            joined, level = torch.cat([above, self._embed(ids[columns])], dim=-1), level + 1
            return self._logits(state, level, joined)

        logits = self._logits(state, 0, joined)
        if budget.tree is not None:
            return grow(
                budget,
                logits[:, 0],
                expand,
                uniforms,
                law=budget.sampling.drafting,
                ids=ids,
                is_live=state.is_seen[rows],
            )
        law = budget.sampling.drafting if budget.draws else None
        temperature = temperature_of(budget.sampling)
        chosen, laws, confidence = [], [], []
        for k in range(depth):
            if k > 0:
                logits = expand(chosen[-1].unsqueeze(1), torch.zeros_like(rows).unsqueeze(1))
            if budget.min_confidence is not None:
                scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
                confidence.append((scaled.amax(-1) - scaled.logsumexp(-1)).exp()[:, 0])
            if law is None:
                chosen.append(greedy_ids(logits[:, 0]))
            else:
                laws.append(process(logits[:, 0], law))
                chosen.append(draw(laws[-1], uniforms[:, k]))
        chain = ids[torch.stack(chosen, dim=1)]
        points = chain_of_points(chain, torch.where(state.is_seen[rows], depth, 0))
        return DraftTree(
            tokens=chain,
            parents=chain_parents(rows.shape[0], depth, chain.device),
            num_nodes=points.num_nodes,
            law_probs=torch.stack(laws, dim=1) if laws else points.law_probs,
            law_ids=ids.expand(*chain.shape, -1) if laws else points.law_ids,
            confidence=torch.stack(confidence, dim=1) if confidence else None,
        )

    @torch.inference_mode()
    def close(self, state: HydraState, rows: Int[Tensor, " R"]) -> None:
        """Forget these rows."""
        state.is_seen[rows] = False
        if state.prefix is not None:
            close(state.prefix, rows)

    def _logits(
        self, state: HydraState, k: int, joined: Float[Tensor, "R W In"]
    ) -> Float[Tensor, "R W C"]:
        inner = self.lm_heads.into(k, self.heads[k](joined))
        return state.matrices[k if len(state.matrices) > 1 else 0](inner)
