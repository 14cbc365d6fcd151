"""Self-speculation: the target drafts for itself with some of its layers left out.

In: token ids, and the target's own KV buffers. Out: K draft tokens, one pass of the kept layers
each. Skipped layers may lie anywhere (Draft & Verify, arXiv:2309.08168; SWIFT, arXiv:2410.06916),
or be all those after an early exit (LayerSkip, arXiv:2404.16710; only for targets trained for it).
No parameters, no memory beside the target's, no training.

Keys and values of committed tokens are those the whole target wrote, so nothing is ever prefilled
twice; what a draft writes lies past the committed length, where the verify step overwrites it.
Which layers to skip is worth a search: `draftlab skips` measures.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from pydantic import NonNegativeInt, PositiveInt, model_validator

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DrafterSettings,
    DraftLoss,
    Observation,
)
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packing import can_pack
from draftlab.targets.step import Step
from draftlab.targets.view import TargetView

_CHANGES_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


class SelfSpeculativeSettings(DrafterSettings):
    """Keys of conf/drafter/self_speculative.yaml.

    Attributes:
        skip_layers: decoder layers to leave out, 0-based; None, without an `exit_layer`, leaves
            out every second one but keeps the first and the last.
        exit_layer: draft with this many first layers alone; None where `skip_layers` chooses.
    """

    skip_layers: tuple[NonNegativeInt, ...] | None
    exit_layer: PositiveInt | None

    @model_validator(mode="after")
    def _check_choice(self) -> "SelfSpeculativeSettings":
        if self.skip_layers is not None and self.exit_layer is not None:
            raise ValueError(
                f"skip_layers={list(self.skip_layers)} with exit_layer={self.exit_layer}: expected "
                "one of them; pass null for the other"
            )
        if self.skip_layers is not None and len(set(self.skip_layers)) < len(self.skip_layers):
            raise ValueError(f"skip_layers={list(self.skip_layers)} names a layer twice")
        return self


@dataclass(slots=True)
class SelfState:
    """Where each slot stands in the target's own memory.

    Attributes:
        kv: the target's buffers.
        base: committed length of each slot, tokens.
        anchor: newest token of each slot, -1 while it holds nothing.
    """

    kv: KVBuffers
    base: list[int]
    anchor: list[int]


class SelfSpeculative(Drafter, kind="self_speculative", settings=SelfSpeculativeSettings):
    """Drafts with the target's kept layers over the target's own KV."""

    def __init__(self, settings: SelfSpeculativeSettings, target: TargetView) -> None:
        """Choose the layers that draft.

        Raises:
            ConfigError: layers the target does not have, or a choice that drafts with all or none.
            UnsupportedTarget: no final norm is known, which a draft's logits need.
        """
        super().__init__()
        self.settings = settings
        self.target = target
        self.layers = kept_layers(settings, target.spec.num_layers)
        target.final_norm(
            torch.zeros(1, target.spec.hidden_size, dtype=target.dtype, device=target.device)
        )
        self._head: Callable[[Tensor], Tensor] | None = None

    @property
    def needs(self) -> FeatureRequest:
        """Ask for no hidden states: the drafts start from the anchor's embedding."""
        return FeatureRequest()

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Refuse to train.

        Raises:
            ConfigError: always; the layers are the target's, and stay as they are.
        """
        raise ConfigError(
            "drafter kind 'self_speculative' has nothing to train: its layers are the target's; "
            "search which of them to skip with draftlab skips target=..."
        )

    def open(self, slots: int, capacity: int, kv: KVBuffers) -> SelfState:
        """Share the target's buffers."""
        if self._head is None:
            self._head = _packed_head(self.target)
        return SelfState(kv, [0] * slots, [-1] * slots)

    def observe(self, state: SelfState, seen: Observation) -> None:
        """Note how far each row's memory is valid, and its newest token."""
        lengths = seen.lengths.tolist()
        newest = seen.next_ids.gather(1, (seen.lengths - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        for row, length, token in zip(seen.rows.tolist(), lengths, newest.tolist(), strict=True):
            if length > 0:
                state.base[row] += length
                state.anchor[row] = token

    def propose(
        self, state: SelfState, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Run the kept layers from the anchor on, one token at a time."""
        rows, device = budget.rows.tolist(), budget.rows.device
        bases = [state.base[row] for row in rows]
        anchors = [state.anchor[row] for row in rows]
        ids = torch.tensor(anchors, dtype=torch.int64, device=device).clamp_min(0)
        goes_on = torch.tensor([anchor >= 0 for anchor in anchors], device=device)
        num_nodes = torch.zeros_like(ids)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        confidences: list[Tensor] = []
        for depth in range(budget.num_draft_tokens):
            logits = self._logits(state, budget.rows, ids, [base + depth for base in bases])
            law = process(logits, budget.sampling) if budget.draws else None
            if budget.min_confidence is not None:
                # told by the law, before a token is drawn from it
                confidences.append((logits.softmax(-1) if law is None else law).amax(-1))
                goes_on = goes_on & (confidences[-1] >= budget.min_confidence)
            num_nodes = num_nodes + goes_on
            ids = greedy_ids(logits) if law is None else draw(law, uniforms[:, depth])
            tokens.append(ids)
            laws += [] if law is None else [law]
            if budget.min_confidence and not goes_on.any():
                break
        chain = torch.stack(tokens, 1)
        confidence = torch.stack(confidences, 1) if confidences else None
        if not laws:
            return replace(chain_of_points(chain, num_nodes), confidence=confidence)
        parents = chain_parents(len(rows), len(tokens), device)
        return DraftTree(chain, parents, num_nodes, torch.stack(laws, 1), None, confidence)

    def close(self, state: SelfState, rows: Int[Tensor, " R"]) -> None:
        """Forget these rows; their memory is the target's to reuse."""
        for row in rows.tolist():
            state.base[row], state.anchor[row] = 0, -1

    def _logits(
        self, state: SelfState, rows: Int[Tensor, " R"], ids: Int[Tensor, " R"], bases: list[int]
    ) -> Float[Tensor, "R V"]:
        """Give the kept layers' logits after one token a row, ids that are no tokens left out."""
        base = torch.tensor(bases, dtype=torch.int64, device=ids.device)
        last = max(bases) + 1
        depths = None
        if last > self.target.spec.max_positions:
            # drafts that cannot be emitted any more; keep them inside the table of positions
            depths = (self.target.spec.max_positions - 1 - base).clamp_max(0).unsqueeze(1)
        step = Step(rows=rows, ids=ids.unsqueeze(1), base=base, live=last, depths=depths)
        hidden = self.target.run_layers(state.kv, step, self.layers)[:, 0]
        assert self._head is not None
        logits = self._head(self.target.final_norm(hidden))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits[:, self.target.spec.num_token_ids :] = -torch.inf
        return logits


def kept_layers(settings: SelfSpeculativeSettings, num_layers: int) -> tuple[int, ...]:
    """Give the layers that draft, ascending.

    Args:
        settings: what to skip, or where to exit.
        num_layers: decoder layers of the target.

    Raises:
        ConfigError: layers the target does not have, or a choice that drafts with all or none.
    """
    if settings.exit_layer is not None:
        if settings.exit_layer >= num_layers:
            raise ConfigError(
                f"exit_layer={settings.exit_layer} of a target with {num_layers} layers: expected "
                f"1..{num_layers - 1}"
            )
        return tuple(range(settings.exit_layer))
    skipped = settings.skip_layers
    if skipped is None:
        skipped = tuple(range(1, num_layers - 1, 2))
    kept = tuple(sorted(set(range(num_layers)) - set(skipped)))
    if max(skipped, default=-1) >= num_layers or not kept or len(kept) == num_layers:
        raise ConfigError(
            f"skip_layers={list(skipped)} of a target with {num_layers} layers: expected at least "
            f"one of 0..{num_layers - 1}, and not all of them"
        )
    return kept


def _packed_head(target: TargetView) -> Callable[[Tensor], Tensor]:
    """Give the LM head in the fastest layout there is; built once, the target never changes."""
    rows = target.head_rows(None)
    is_plain = all(target.config.get(name) is None for name in _CHANGES_LOGITS)
    return fuse(rows) if is_plain and can_pack(rows) else target.head
