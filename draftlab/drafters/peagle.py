"""P-EAGLE: an EAGLE-3 head that drafts all its tokens in one pass (arXiv:2602.01469).

In: taps of the target and the tokens that followed. Out: chains of draft tokens, each on its own;
when training, a loss over `num_depths` depths.

Row t at depth 0 pairs tap t with the embedding of token t + 1 and predicts token t + 2, as in
eagle3.py. Where EAGLE-3 feeds back its own output, here stands one learned state: depth d >= 1 is a
row with a mask token's embedding and `mask_hidden` in the place of taps, at position t + d. Depths
look at all true rows up to t and at the depths before them. Training every depth everywhere costs
num_depths times a head, so deeper ones are trained on ever fewer rows, each of which has all the
depths above it (the paper's COD sampling). Read first: Eagle3, then forward here, then
_peagle_memory.py.
"""

from dataclasses import dataclass

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import nn

from draftlab.data.batch import TokenBatch
from draftlab.drafters._chain import depth_of
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._eagle_layer import EagleLayer
from draftlab.drafters._feature_drafter import FeatureDrafter
from draftlab.drafters._one_pass import propose_at_once
from draftlab.drafters._peagle_memory import ParallelMemory
from draftlab.drafters._spans import past_spans
from draftlab.drafters._taps import TapSettings, default_taps, side_by_side
from draftlab.drafters._training_attention import attend_unrolled
from draftlab.drafters._unrolling import PickedRows, everywhere
from draftlab.drafters._windows import check_window
from draftlab.drafters.base import DraftBudget, DraftLoss, Observation, ServingWeights
from draftlab.drafters.layers import LayerSizes, RMSNorm, angles_of, layer_config
from draftlab.drafters.tree import DraftTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import TargetFeatures
from draftlab.targets.packing import PackedLinear
from draftlab.targets.view import TargetView


class PEagleSettings(TapSettings):
    """Keys of conf/drafter/peagle.yaml.

    Attributes:
        fc_norm: a norm for each tap before `fc`.
        norm_before_residual: the residual is taken after the norm of the hidden half.
        mask_token_id: target id whose embedding stands for tokens not known yet; None means the
            last one, a padding row where the vocabulary has any.
        num_depths: depths trained, and the most that can be drafted.
        depth_keep: share of the rows of a depth that the next one is trained on as well.
        depth_keep_floor: smallest share of all rows that a depth is trained on.
    """

    fc_norm: bool
    norm_before_residual: bool
    mask_token_id: int | None
    num_depths: PositiveInt
    depth_keep: float = Field(gt=0, le=1)
    depth_keep_floor: float = Field(ge=0, le=1)

    @model_validator(mode="after")
    def _check_depths(self) -> "PEagleSettings":
        if self.num_draft_tokens > self.num_depths:
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} is more than num_depths="
                f"{self.num_depths}; expected a trained depth for every draft token"
            )
        check_window(self.sliding_window, "num_depths", self.num_depths)
        return self


@dataclass(slots=True)
class PEagleState:
    """Memory of the layers, the LM head as decoding applies it, and the ids it says."""

    memory: ParallelMemory
    head: PackedLinear
    ids: Int[Tensor, " C"]


class PEagle(FeatureDrafter[PEagleSettings], kind="peagle", settings=PEagleSettings):
    """An EAGLE-3 head whose later depths read a learned state instead of their own output."""

    def __init__(
        self, settings: PEagleSettings, target: TargetView, vocab: DraftVocab | None = None
    ) -> None:
        """Build the head in float32 or wider, on the target's device.

        Args:
            settings: see conf/drafter/peagle.yaml.
            target: the frozen target; embedding and LM head stay its own.
            vocab: the draft vocabulary; None means the target's whole one.

        Raises:
            ConfigError: taps or a mask token that the target does not have.
        """
        taps = settings.tap_layers or default_taps(target.spec.num_layers)
        super().__init__(settings, target, vocab, taps)
        self.max_draft_tokens = settings.num_depths
        width = target.spec.hidden_size
        self.mask_token_id = mask_token(settings.mask_token_id, target)
        self.sizes = sizes = LayerSizes.of(target.config, settings.intermediate_size)
        self._angles = angles_of(target, sizes.head_dim)

        self.fc = nn.Linear(len(taps) * width, width, bias=False)
        self.fc_norm = (
            nn.ModuleList(RMSNorm(width, sizes.eps) for _ in taps) if settings.fc_norm else None
        )
        self.mask_hidden = nn.Parameter(torch.randn(len(taps) * width))
        self.layers = nn.ModuleList(
            EagleLayer(sizes, is_first=i == 0, norm_before_residual=settings.norm_before_residual)
            for i in range(settings.num_layers)
        )
        self.norm = RMSNorm(width, sizes.eps)
        self.to(torch.promote_types(target.dtype, torch.float32)).to(target.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def fuse_taps(self, taps: Float[Tensor, "*N L D"]) -> Float[Tensor, "*N D"]:
        """Join the taps of a position into one hidden state."""
        return self.fc(side_by_side(taps.to(self.dtype), self.fc_norm)).to(self.dtype)

    def fuse_mask(self) -> Float[Tensor, " D"]:
        """Give the hidden state of a row whose taps are not known."""
        return self.fuse_taps(self.mask_hidden.view(len(self.needs.tap_layers), -1))

    def embed_mask(self) -> Float[Tensor, " D"]:
        """Embed the token that stands for unknown ones."""
        return self._embed(torch.tensor([self.mask_token_id], device=self.fc.weight.device))[0]

    def eagle_layers(self) -> list[EagleLayer]:
        """Give the layers by their type."""
        return [layer for layer in self.layers if isinstance(layer, EagleLayer)]

    # ---------------------------------------------------------------- training

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare every depth with the target, at the rows it is trained on."""
        assert features.taps is not None
        assert features.final is not None
        masks, rows, widths = self._sample_depths(batch, noise)
        states = self._run(batch, self.fuse_taps(features.taps), rows, widths)
        predictions = Predictions.arrange(batch, masks, lead=2, dtype=self.dtype)
        hidden = predictions.take(states, rows.place)
        predictions = self._weigh(batch, predictions, hidden)
        return self._score(batch, features.final, predictions, hidden)

    def _sample_depths(
        self, batch: TokenBatch, noise: Noise
    ) -> tuple[Bool[Tensor, "K B T"], PickedRows, list[int]]:
        """Choose the rows of every depth; those of a deeper one stand first.

        Returns:
            Where depth k of row t counts; the rows in order; how many of them depth k runs.
        """
        choices = self._choices
        depths = range(choices.num_depths)
        drawn = noise.uniform(batch.sample_ids, 1, "depths").squeeze(-1)
        shares = [max(choices.depth_keep**k, choices.depth_keep_floor) for k in depths]
        masks = torch.stack(
            [batch.shifted_mask(k + 2) & (drawn < share) for k, share in enumerate(shares)]
        )
        needed = masks.any(0)
        # a deep prediction may count where the shallow ones do not, such as across a question
        reach = torch.stack([masks[k:].any(0) for k in depths])
        deepest = reach.sum(0)  # depths that a row takes part in
        width = max(int(needed.sum(1).max()), 1)
        index = deepest.argsort(dim=1, descending=True, stable=True)[:, :width]
        place = torch.full_like(index, -1).new_full(needed.shape, -1)
        order = torch.arange(width, device=index.device).expand_as(index)
        rows = PickedRows(index, place.scatter_(1, index, order))
        return masks, rows, [max(int(r.sum(1).max()), 1) for r in reach]

    def _run(
        self, batch: TokenBatch, hidden: Tensor, rows: PickedRows, widths: list[int]
    ) -> list[Float[Tensor, "B A D"]]:
        """Give the normed output of every depth, at the first `widths[depth]` rows."""
        window = self._choices.sliding_window
        full = everywhere(batch, window)
        spans = [
            past_spans(batch.segment_ids, rows.index[:, :width], window=window, ahead=depth)
            for depth, width in enumerate(widths)
        ]
        positions = rows.take(batch.positions)
        embedded, angles = self._embed(batch.shifted_ids(1)), self._angles(batch.positions)
        unknown, learned = self.embed_mask(), self.fuse_mask()
        shapes = [(hidden.shape[0], width, -1) for width in widths]
        states = [learned.expand(*shape) for shape in shapes]
        for i, layer in enumerate(self.eagle_layers()):
            x, residual = layer.read(embedded, hidden)
            keys, values = layer.keys_values(x, *angles)
            if i == len(self.layers) - 1:
                x, residual = rows.take(x), rows.take(residual)
                queries = layer.queries(x, rows.take(angles[0]), rows.take(angles[1]))
                mixed = attend_unrolled(queries, keys, values, spans[0], [])
            else:
                mixed = attend_unrolled(layer.queries(x, *angles), keys, values, full, [])
            hidden = layer.finish(mixed, residual)
            own: list[tuple[Tensor, Tensor]] = []
            for depth, width in list(enumerate(widths))[1:]:
                x, residual = layer.read(unknown.expand(*shapes[depth]), states[depth])
                turned = self._angles(positions[:, :width] + depth)
                own = [(k[:, :width], v[:, :width]) for k, v in own]
                own.append(layer.keys_values(x, *turned))
                queries = layer.queries(x, *turned)
                mixed = attend_unrolled(queries, keys, values, spans[depth], own)
                states[depth] = layer.finish(mixed, residual)
        states[0] = hidden
        return [self.norm(state) for state in states]

    # ---------------------------------------------------------------- decoding

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> PEagleState:
        """Make buffers, rotary tables and fused matrices."""
        del kv
        memory = ParallelMemory(
            self.eagle_layers(),
            self._angles,
            slots=slots,
            capacity=capacity,
            num_depths=self._choices.num_depths,
            mask_inputs=(self.embed_mask(), self.fuse_mask()),
            window=self._choices.sliding_window,
        )
        return PEagleState(memory, self._head.packed(self.dtype), self._head.support())

    @torch.inference_mode()
    def observe(self, state: PEagleState, seen: Observation) -> None:
        """Take in true rows."""
        assert seen.taps is not None
        if int(seen.lengths.max()) > 0:
            state.memory.observe(seen, self._embed(seen.next_ids), self.fuse_taps(seen.taps))

    @torch.inference_mode()
    def propose(
        self, state: PEagleState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run the newest true rows and the mask rows in one pass; read a token off each depth."""
        rows = budget.rows
        depth = depth_of(budget, self._choices.num_depths)
        logits = state.head(self.norm(state.memory.run(rows, depth)))
        num_nodes = state.memory.num_nodes(rows, depth)
        return propose_at_once(budget, logits, uniforms, ids=state.ids, num_nodes=num_nodes)

    @torch.inference_mode()
    def close(self, state: PEagleState, rows: Int[Tensor, " R"]) -> None:
        """Forget these sequences."""
        state.memory.close(rows)

    # ---------------------------------------------------------------- serving

    def serving_weights(self) -> ServingWeights:
        """Give the head under EAGLE-3's names, and what stands in the place of unknown rows."""
        return ServingWeights(
            architecture="peagle",
            config=layer_config(self.sizes, self.target)
            | {
                "num_hidden_layers": self._choices.num_layers,
                "target_hidden_size": self.target.spec.hidden_size,
                "draft_vocab_size": self._head.size,
                "tap_layers": list(self.needs.tap_layers),
                "fc_norm": self._choices.fc_norm,
                "norm_before_fc": False,
                "norm_output": False,
                "norm_before_residual": self._choices.norm_before_residual,
                "mask_token_id": self.mask_token_id,
                "num_depths": self._choices.num_depths,
                "sliding_window": self._choices.sliding_window,
                "attention_bias": False,
                "tie_word_embeddings": False,
            },
            tensors=dict(self.state_dict()) | self._head.serving_tensors(),
        )


def mask_token(token_id: int | None, target: TargetView) -> int:
    """Choose the token that stands for unknown ones.

    Raises:
        ConfigError: one that the target does not have, or that ends an answer.
    """
    count = target.spec.vocab_size
    if token_id is None:
        return count - 1
    if not 0 <= token_id < count or token_id in target.spec.eos_ids:
        raise ConfigError(
            f"mask_token_id={token_id}: expected an id in 0..{count - 1} that is no end token; "
            "null chooses the last one"
        )
    return token_id
