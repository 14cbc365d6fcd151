"""EAGLE-3: a small decoder layer that reads the target's hidden states and feeds back its own.

In: taps of the target and the tokens that followed. Out: chains of draft tokens; when training, a
loss over `unroll_steps` depths. Read first: Eagle3, forward, then propose.

Paper: arXiv:2503.01840; version 3.1 (norms on the taps, post-norm feedback) after arXiv:2605.09992.

Position j of the head pairs tap j with the embedding of token j + 1 and predicts token j + 2. At
depth s >= 1 there is no tap of position j + s yet, so the head's own output takes its place. Loss
rule: a prediction counts when the token *predicted* is learned (case O-06): row t at depth s counts
when token t + 2 + s is.
"""

from dataclasses import dataclass

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._eagle_layer import EagleLayer, LayerMatrices, NewPositions, decode_layer
from draftlab.drafters._unrolling import PickedRows, attend_unrolled, segment_mask, sequence_sums
from draftlab.drafters._warm_start import final_norm_weight, start_layers
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DraftLoss,
    DraftVocabSettings,
    Observation,
    ServingWeights,
)
from draftlab.drafters.layers import LayerSizes, RMSNorm, Rope, fuse, rope_of, signed_sin
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.drafters.vocab import DraftVocab, judged_rows, kept_target_head
from draftlab.errors import ConfigError
from draftlab.objectives.chunked import chunked_scores
from draftlab.objectives.named import objective
from draftlab.randomness import Noise
from draftlab.sampling import Sampling, draw, greedy_ids, process
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class Eagle3Settings(DraftVocabSettings):
    """Keys of conf/drafter/eagle3.yaml.

    Attributes:
        tap_layers: taps to read, ascending; None means 2, L // 2 and L - 3.
        num_layers: decoder layers of the head.
        intermediate_size: width of its MLP; None means the target's.
        fc_norm: a norm for each tap before `fc`.
        norm_before_fc: one norm over all taps before `fc` instead.
        norm_output: feed back the state after the final norm.
        norm_before_residual: the residual is taken after the norm of the hidden half.
        train_head: an LM head of its own, started from the target's rows.
        unroll_steps: depths trained.
        step_decay: weight of a depth relative to the one before it.
        objective: name of the loss.
        tap_noise: half-width of uniform noise on the taps while training.
        init_from_layer: 0-based target layer the head starts from; negative counts from the end.
        init_noise: half-width of the embedding half's uniform start, with `init_from_layer`.
    """

    tap_layers: tuple[int, ...] | None
    num_layers: PositiveInt
    intermediate_size: PositiveInt | None
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    train_head: bool
    unroll_steps: PositiveInt
    step_decay: float = Field(gt=0, le=1)
    objective: str
    tap_noise: NonNegativeFloat
    init_from_layer: int | None
    init_noise: NonNegativeFloat

    @model_validator(mode="after")
    def _check_choices(self) -> "Eagle3Settings":
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one to false")
        if self.tap_layers is not None and not self.tap_layers:
            raise ValueError("tap_layers=[]: expected at least one tap, or null for the default")
        try:
            objective(self.objective)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


@dataclass(slots=True)
class Eagle3State:
    """Sequences being drafted for. `committed` mirrors `lengths` on the host.

    Attributes:
        kv: keys and values by true taps, slot = position; one slot more than `capacity`, where
            writes that count for nothing go.
        capacity: longest sequence, tokens.
        lengths: positions observed, per slot.
        committed: the same numbers as Python integers.
        hidden: what the head feeds back after the last observed position, per slot.
        logits: over the draft vocabulary, for the first draft token, per slot.
        ids: target id of every column of `logits`.
        cos: rotary table by position.
        sin: rotary table by position, through `signed_sin`.
        layers: matrices, one entry a layer.
        fc: joins the taps.
        head: the LM head.
    """

    kv: KVBuffers
    capacity: int
    lengths: Int[Tensor, " slots"]
    committed: list[int]
    hidden: Float[Tensor, "slots D"]
    logits: Float[Tensor, "slots C"]
    ids: Int[Tensor, " C"]
    cos: Tensor
    sin: Tensor
    layers: list[LayerMatrices]
    fc: PackedLinear
    head: PackedLinear


class Eagle3(Drafter, kind="eagle3", settings=Eagle3Settings):
    """Autoregressive head on fused low, middle and high features of the target."""

    vocab_ids: Tensor | None
    lm_head: Tensor
    kept_head: Tensor | None

    def __init__(
        self, settings: Eagle3Settings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the head in float32 or wider, on the target's device.

        Args:
            settings: see conf/drafter/eagle3.yaml.
            target: the frozen target; embedding and, unless `train_head`, LM head stay its own.
            vocab: the draft vocabulary; None means the target's whole one.

        Raises:
            ConfigError: taps the target does not have, or a layer that cannot start the head.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.target = target
        self.vocab = vocab
        spec = target.spec
        width = spec.hidden_size
        taps = settings.tap_layers or default_taps(spec.num_layers)
        self._needs = FeatureRequest(taps, wants_final=True)
        self._needs.check(spec.num_layers)
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self.rope: Rope = rope_of(target, sizes.head_dim)

        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(width, sizes.eps) for _ in taps) if settings.fc_norm else None
        )
        self.input_norm = RMSNorm(len(taps) * width, sizes.eps) if settings.norm_before_fc else None
        self.layers = nn.ModuleList(
            EagleLayer(sizes, is_first=i == 0, norm_before_residual=settings.norm_before_residual)
            for i in range(settings.num_layers)
        )
        self.norm = RMSNorm(width, sizes.eps)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)
        if settings.init_from_layer is not None:
            self._start_from_target(settings.init_from_layer)

        ids = None if vocab is None else vocab.ids.to(target.device)
        self.register_buffer("vocab_ids", ids, persistent=False)
        rows = target.head_rows(ids)
        # a plain attribute: the target's weights are never saved, nor moved to another dtype
        self.kept_head = kept_target_head(target, vocab)
        if settings.train_head:
            self.lm_head = nn.Parameter(rows.to(self.fc.weight.dtype, copy=True))
        else:
            self.register_buffer("lm_head", rows, persistent=False)

    @torch.no_grad()
    def _start_from_target(self, layer: int) -> None:
        """Start as a continuation of the target: its last tap, its layers, its final norm."""
        start_layers(self.layers, self.target, layer, embedding_noise=self._choices.init_noise)
        width = self.sizes.hidden
        self.fc.weight.zero_()
        self.fc.weight[:, -width:].fill_diagonal_(1.0)
        self.norm.weight.copy_(final_norm_weight(self.target))

    @property
    def needs(self) -> FeatureRequest:
        """Taps for the head, the final state for the target's law."""
        return self._needs

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Unroll the head over its own output and compare every depth with the target.

        A sequence's loss is the mean over its predictions, each weighted by step_decay ** depth.
        Rows that no depth learns from skip everything but the keys others look at.
        """
        assert features.taps is not None
        assert features.final is not None
        steps = self._choices.unroll_steps
        masks = torch.stack([batch.shifted_mask(s + 2) for s in range(steps)])
        rows = PickedRows.pick(masks.any(0))
        states = self._unroll(batch, self._join(self._noisy(features.taps, batch, noise)), rows)
        return self._compare(batch, features.final, masks, rows, states)

    def _noisy(self, taps: Tensor, batch: TokenBatch, noise: Noise) -> Tensor:
        if not self.training or self._choices.tap_noise == 0:
            return taps
        drawn = noise.uniform(batch.sample_ids, taps.shape[2] * taps.shape[3], "tap_noise")
        return taps + (2 * drawn.view(taps.shape) - 1).to(taps.dtype) * self._choices.tap_noise

    def _join(
        self, taps: Float[Tensor, "B T L D"], packed: PackedLinear | None = None
    ) -> Float[Tensor, "B T D"]:
        """Fuse the taps of a position into one hidden state; decoding brings `fc` packed."""
        taps = taps.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            normed = [norm(taps[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            taps = torch.stack(normed, dim=-2)
        joined = taps.flatten(-2)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        fused = self.fc(joined) if packed is None else packed(joined)
        return fused.to(self.fc.weight.dtype)  # the residual stream keeps its precision

    def _embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        return self.target.embed(ids).detach().to(self.fc.weight.dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rope(positions)
        return cos, signed_sin(sin)

    def _unroll(self, batch: TokenBatch, hidden: Tensor, rows: PickedRows) -> list[Tensor]:
        """Give the normed output [B A D] of every depth, at the picked rows."""
        mask = rows.take(batch.segment_ids).unsqueeze(2) == batch.segment_ids.unsqueeze(1)
        order = torch.arange(batch.input_ids.shape[1], device=mask.device)
        mask &= order <= rows.index.unsqueeze(2)
        positions = rows.take(batch.positions)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]

        embedded = self._embed(batch.shifted_ids(1))
        hidden, past = self._first_depth(batch, embedded, hidden, mask, rows)
        states = []
        for depth in range(self._choices.unroll_steps):
            if depth > 0:
                embedded = self._embed(rows.take(batch.shifted_ids(1 + depth)))
                angles = self._angles(positions + depth)
                for layer, (keys, values), mine in zip(self._layers(), past, own, strict=True):
                    x, residual = layer.read(embedded, hidden)
                    mine.append(layer.keys_values(x, *angles))
                    queries = layer.queries(x, *angles)
                    mixed = attend_unrolled(queries, keys, values, mask, mine)
                    hidden = layer.finish(mixed, residual)
            normed = self.norm(hidden)
            states.append(normed)
            hidden = normed if self._choices.norm_output else hidden
        return states

    def _first_depth(
        self, batch: TokenBatch, embedded: Tensor, hidden: Tensor, mask: Tensor, rows: PickedRows
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run depth 0: keys everywhere; the last layer's output at the picked rows only."""
        angles = self._angles(batch.positions)
        past = []
        full = None
        for i, layer in enumerate(self._layers()):
            x, residual = layer.read(embedded, hidden)
            keys, values = layer.keys_values(x, *angles)
            past.append((keys, values))
            if i == len(self.layers) - 1:
                x, residual = rows.take(x), rows.take(residual)
                queries = layer.queries(x, rows.take(angles[0]), rows.take(angles[1]))
                mixed = attend_unrolled(queries, keys, values, mask, [])
            else:
                full = segment_mask(batch) if full is None else full
                mixed = attend_unrolled(layer.queries(x, *angles), keys, values, full, [])
            hidden = layer.finish(mixed, residual)
        return hidden, past

    def _compare(
        self,
        batch: TokenBatch,
        final: Tensor,
        masks: Bool[Tensor, "K B T"],
        rows: PickedRows,
        states: list[Tensor],
    ) -> DraftLoss:
        """Meet the target's law: it judges token u + 1 at u; depth s predicts that at u - 1 - s."""
        b, t = masks[0].nonzero(as_tuple=True)
        u = t + 1
        depths = torch.arange(masks.shape[0], device=u.device).unsqueeze(1)
        source = u - 1 - depths  # [K N]: the row that predicts it at each depth
        counts = (source >= 0) & masks[depths, b, source.clamp_min(0)]
        place = rows.place[b, source.clamp_min(0)].clamp_min(0) + b * states[0].shape[1]
        hidden = torch.stack(
            [
                state.flatten(0, 1).index_select(0, where)
                for state, where in zip(states, place, strict=True)
            ]
        )
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = counts.to(wide) * self._choices.step_decay ** depths.to(wide)
        scores = chunked_scores(
            objective(self._choices.objective),
            hidden,
            [self.lm_head],
            target_final=final[b, u],
            target_head=self.target.head,
            labels=batch.input_ids[b, u + 1],
            weights=weights / sequence_sums(batch.segment_ids, b, u, weights.sum(0)),
            vocab_ids=self.vocab_ids,
            kept_head=self.kept_head,
            judged=judged_rows(batch.positions[b, u]),
        )
        return DraftLoss(
            scores.total, scores.loss_sum, scores.hit_sum, scores.overlap_sum, scores.count
        )

    def _layers(self) -> list[EagleLayer]:
        return [layer for layer in self.layers if isinstance(layer, EagleLayer)]

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> Eagle3State:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        dtype, device = self.fc.weight.dtype, self.fc.weight.device
        sizes = self.sizes
        num_ids = self.target.spec.num_token_ids
        ids = self.vocab_ids if self.vocab_ids is not None else torch.arange(num_ids, device=device)
        cos, sin = self._angles(torch.arange(capacity + 1, device=device))
        return Eagle3State(
            kv=KVBuffers(
                num_layers=len(self.layers),
                num_kv_heads=sizes.kv_heads,
                head_dim=sizes.head_dim,
                slots=slots,
                capacity=capacity + 1,
                dtype=dtype,
                device=device,
            ),
            capacity=capacity,
            lengths=torch.zeros(slots, dtype=torch.int64, device=device),
            committed=[0] * slots,
            hidden=torch.zeros(slots, sizes.hidden, dtype=dtype, device=device),
            logits=torch.zeros(slots, ids.shape[0], dtype=dtype, device=device),
            ids=ids,
            cos=cos.to(dtype),
            sin=sin.to(dtype),
            layers=[LayerMatrices.of(layer) for layer in self._layers()],
            fc=fuse(self.fc.weight),
            head=fuse(self.lm_head[: ids.shape[0]].to(dtype)),  # padding rows come last
        )

    @torch.inference_mode()
    def observe(self, state: Eagle3State, seen: Observation) -> None:
        """Write keys and values by true taps; keep the last position's output for `propose`."""
        assert seen.taps is not None
        slots = seen.rows.tolist()
        counts = seen.lengths.tolist()
        if max(counts, default=0) == 0:
            return
        base = state.lengths[seen.rows]
        columns = torch.arange(seen.ids.shape[1], device=base.device)
        last = (seen.lengths - 1).clamp_min(0)
        for slot, count in zip(slots, counts, strict=True):
            state.committed[slot] += count
        where = NewPositions(
            rows=seen.rows,
            positions=(base.unsqueeze(1) + columns).clamp_max(state.capacity),
            live=max(state.committed[slot] for slot in slots),
            is_prefix=slots == list(range(len(slots))),
            is_level=False,
            last=last,
        )
        fused = self._join(seen.taps, state.fc)
        hidden = self._advance(state, where, self._embed(seen.next_ids), fused)
        normed = self.norm(hidden)
        fed = normed if self._choices.norm_output else hidden
        has_new = (seen.lengths > 0).unsqueeze(1)
        state.hidden[seen.rows] = torch.where(has_new, fed, state.hidden[seen.rows])
        state.logits[seen.rows] = torch.where(has_new, state.head(normed), state.logits[seen.rows])
        state.lengths[seen.rows] = base + seen.lengths

    @torch.inference_mode()
    def propose(
        self, state: Eagle3State, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft a chain: the first token from what was observed, the others from own states.

        Own keys and values go past a row's length, where the next `observe` overwrites them.
        """
        rows, depth = budget.rows, budget.num_draft_tokens
        slots = rows.tolist()
        lengths = state.lengths[rows]
        known = [state.committed[slot] for slot in slots]
        is_prefix, is_level = slots == list(range(len(slots))), len(set(known)) == 1
        hidden, logits = state.hidden[rows], state.logits[rows]
        law = Sampling(budget.sampling.temperature) if budget.draws else None
        first = torch.zeros_like(rows)
        tokens, laws = [], []
        for k in range(depth):
            if k > 0:
                where = NewPositions(
                    rows=rows,
                    positions=(lengths + (k - 1)).clamp_max(state.capacity).unsqueeze(1),
                    live=min(max(known) + k, state.capacity + 1),
                    is_prefix=is_prefix,
                    is_level=is_level,
                    last=first,
                )
                embedded = self._embed(tokens[-1].unsqueeze(1))
                hidden = self._advance(state, where, embedded, hidden.unsqueeze(1))
                normed = self.norm(hidden)
                hidden = normed if self._choices.norm_output else hidden
                logits = state.head(normed)
            if law is None:
                columns = greedy_ids(logits)
            else:
                laws.append(process(logits, law))
                columns = draw(laws[-1], uniforms[:, k])
            tokens.append(state.ids[columns])
        room = (state.capacity - 1 - lengths).clamp(0, depth)
        num_nodes = torch.where(lengths > 0, room, 0)
        chain = torch.stack(tokens, dim=1)
        if law is None:
            return chain_of_points(chain, num_nodes)
        return DraftTree(
            tokens=chain,
            parents=chain_parents(len(slots), depth, chain.device),
            num_nodes=num_nodes,
            law_probs=torch.stack(laws, dim=1),
            law_ids=state.ids.expand(len(slots), depth, -1),
        )

    @torch.inference_mode()
    def close(self, state: Eagle3State, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences; what lies in their buffers is past their length."""
        state.lengths[rows] = 0
        for slot in rows.tolist():
            state.committed[slot] = 0

    def _advance(
        self, state: Eagle3State, where: NewPositions, embedded: Tensor, hidden: Tensor
    ) -> Float[Tensor, "R D"]:
        """Run new positions [R W] through the layers; give the residual stream of one a row."""
        angles = state.cos[where.positions], state.sin[where.positions]
        for i, (layer, matrices) in enumerate(zip(self._layers(), state.layers, strict=True)):
            hidden = decode_layer(
                layer,
                matrices,
                i,
                (embedded, hidden),
                where,
                state.kv,
                angles,
                only_last=i == len(state.layers) - 1 and where.positions.shape[1] > 1,
            )
        return hidden[:, 0]

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the head under the names all engines share; layer ids count as our taps do."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        tensors.pop("lm_head", None)
        if self.vocab is not None or self._choices.train_head:
            tensors["lm_head.weight"] = self.lm_head.detach()
        size = self.target.spec.vocab_size
        if self.vocab is not None:
            size = self.vocab.size
            if size != self.vocab.target_vocab_size:
                tensors["d2t"] = self.vocab.d2t
                tensors["t2d"] = self.vocab.t2d
        config = self.target.config
        return ServingWeights(
            architecture="eagle3",
            config={
                "hidden_size": self.sizes.hidden,
                "target_hidden_size": self.target.spec.hidden_size,
                "intermediate_size": self.sizes.intermediate,
                "num_hidden_layers": self._choices.num_layers,
                "num_attention_heads": self.sizes.heads,
                "num_key_value_heads": self.sizes.kv_heads,
                "head_dim": self.sizes.head_dim,
                "hidden_act": "silu",
                "rms_norm_eps": self.sizes.eps,
                "rope_parameters": config.get("rope_parameters")
                or {"rope_type": "default", "rope_theta": 10000.0},
                "max_position_embeddings": self.target.spec.max_positions,
                "vocab_size": self.target.spec.vocab_size,
                "draft_vocab_size": size,
                "tap_layers": list(self._needs.tap_layers),
                "fc_norm": self._choices.fc_norm,
                "norm_before_fc": self._choices.norm_before_fc,
                "norm_output": self._choices.norm_output,
                "norm_before_residual": self._choices.norm_before_residual,
                "attention_bias": False,
                "tie_word_embeddings": False,
            },
            tensors=tensors,
        )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Choose a low, a middle and a high tap: 2, L // 2, L - 3, as every server does by default.

    Below seven layers these would meet, so there: the first, the middle and the last.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))
