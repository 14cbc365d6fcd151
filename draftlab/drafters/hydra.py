"""Hydra: heads on the target's final state that also see the tokens drafted so far.

In: the final hidden state h_t and the embeddings of the tokens after it. Out: head k (0-based)
predicts token t + 2 + k from [h_t, e(t+1), ..., e(t+1+k)]; token t + 1 is the anchor (Hydra,
arXiv:2402.05109, section 3). Heads run one after another, so a draft is a chain or a tree whose
nodes know their ancestors. `prefix_attention` puts one decoder layer over all final states in place
of h_t (Hydra++, section 4). Distilled from the target's law.

Read `SequentialHead` first, then `Hydra.forward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.drafters._chain import Chain, depth_of, largest_probability
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._eagle_layer import EagleLayer, NewPositions, decode_layers
from draftlab.drafters._eagle_memory import HeadMemory, close, observe, open_memory
from draftlab.drafters._feature_drafter import FeatureDrafter
from draftlab.drafters._growth import grow
from draftlab.drafters._lm_heads import HeadsSettings, LMHeads
from draftlab.drafters._unrolling import PickedRows, unroll
from draftlab.drafters.base import DraftBudget, DraftLoss, Observation
from draftlab.drafters.layers import LayerSizes, angles_of, fuse
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.randomness import Noise
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class HydraSettings(HeadsSettings):
    """Keys of conf/drafter/hydra.yaml.

    Attributes:
        prefix_attention: a decoder layer over the final states before the heads.
    """

    prefix_attention: bool


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


class Hydra(FeatureDrafter[HydraSettings], kind="hydra", settings=HydraSettings):
    """K sequential heads on the target's final hidden state."""

    def __init__(
        self, settings: HydraSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the heads in float32 or wider, started from the target's LM head."""
        super().__init__(settings, target, vocab)
        self.max_draft_tokens = settings.num_heads
        width, count = target.spec.hidden_size, settings.num_heads
        self.heads = nn.ModuleList(
            SequentialHead(width, 1 + k, settings.num_blocks) for k in range(count)
        )
        self.lm_heads = LMHeads(settings.head, settings.head_rank, count, self._head.rows)
        self.prefix: EagleLayer | None = None
        if settings.prefix_attention:
            sizes = LayerSizes.of(target.config)
            self._angles = angles_of(target, sizes.head_dim)
            self.prefix = EagleLayer(sizes, is_first=False)
            # adds nothing yet, so that heads start from the final state
            nn.init.zeros_(self.prefix.self_attn.o_proj.weight)
            nn.init.zeros_(self.prefix.mlp.down_proj.weight)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.heads.parameters()).dtype

    @property
    def _matrices(self) -> Sequence[Float[Tensor, "C Dh"]]:
        return self.lm_heads.matrices

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Teach head k, at position t, what the target says at t + 1 + k of token t + 2 + k.

        The tokens in between are the data's own.
        """
        final = features.final
        assert final is not None, "`needs` asks for the final hidden state"
        count = self._choices.num_heads
        masks = torch.stack([batch.shifted_mask(2 + k) for k in range(count)])
        predictions = Predictions.arrange(batch, masks, lead=2, dtype=self.dtype)
        states, places = self._states(batch, final.to(self.dtype), masks)
        b = predictions.batch_rows
        last = batch.input_ids.shape[1] - 1
        inner = []
        for k, source in enumerate(predictions.sources):
            ids = [batch.input_ids[b, (source + 1 + j).clamp_max(last)] for j in range(1 + k)]
            embedded = self._embed(torch.stack(ids, dim=1)).flatten(1)
            joined = torch.cat([states[b, places[b, source].clamp_min(0)], embedded], dim=-1)
            inner.append(self.lm_heads.into(k, self.heads[k](joined)))
        hidden = torch.stack(inner)
        predictions = self._weigh(batch, predictions, hidden)
        return self._score(batch, final, predictions, hidden)

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

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> HydraState:
        """Make room for one state a slot and, with prefix attention, for its keys and values."""
        del kv
        width, device = self.target.spec.hidden_size, self.target.device
        memory = None
        if self.prefix is not None:
            nothing = fuse(torch.zeros(1, width, dtype=self.dtype, device=device))
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
            hidden=torch.zeros(slots, width, dtype=self.dtype, device=device),
            anchors=torch.zeros(slots, dtype=torch.int64, device=device),
            is_seen=torch.zeros(slots, dtype=torch.bool, device=device),
            matrices=[fuse(m[:known].to(self.dtype)) for m in self.lm_heads.matrices],
            prefix=memory,
        )

    @torch.inference_mode()
    def observe(self, state: HydraState, seen: Observation) -> None:
        """Keep the state of the last position of every row that has one, and its anchor."""
        assert seen.final is not None, "`needs` asks for the final hidden state"
        final = seen.final.to(self.dtype)
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
        depth = depth_of(budget, self._choices.num_heads)
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
        chain, told = Chain(budget, uniforms, ids), []
        for k in range(depth):
            if budget.min_confidence is not None:
                told.append(largest_probability(logits, budget.sampling)[:, 0])
            columns = chain.choose(logits[:, 0])
            if k < depth - 1:
                logits = expand(columns.unsqueeze(1), torch.zeros_like(rows).unsqueeze(1))
        return chain.finish(torch.where(state.is_seen[rows], depth, 0), told)

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
