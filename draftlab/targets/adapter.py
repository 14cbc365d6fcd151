"""The transformers path, and the only file that knows transformers' argument names (5.17 to 5.24).

In: a causal language model, `KVBuffers` and a `Step`. Out: logits and hidden states.
Read first: HFDoor.forward, then _make_attention and _StepLayer.

No model code is patched. An attention function of ours is registered under a name of its own and
no mask function: for an unknown name transformers makes no masks. A cache of ours writes into the
KV buffers. Both read one plain object, the pass in progress, because some families drop extra
keyword arguments on the way to the attention function.
"""

import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from draftlab.errors import ShapeMismatch, UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.attention import attend, tile_mask
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.packed_attention import PackedAttention
from draftlab.targets.step import Step, StepOutput

_names = itertools.count()


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a causal language model that draftlab touches.

    Attributes:
        base: the model without its LM head.
        embedding: token ids to vectors, a scale included.
        layers: decoder layers in order.
        norm: the final norm, or None where it could not be told.
        rotary: the module that makes cos and sin, or None without rotary positions.
        head: final hidden states to unscaled logits.
        embedding_weight: V vectors.
        head_weight: V rows; the same tensor where the model ties them.
    """

    base: nn.Module
    embedding: nn.Module
    layers: nn.ModuleList
    norm: nn.Module | None
    rotary: nn.Module | None
    head: nn.Module
    embedding_weight: Tensor
    head_weight: Tensor


def find_anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the parts of a model by structure, not by family.

    Raises:
        UnsupportedTarget: no LM head or no list of decoder layers.
    """
    config = model.config.get_text_config()
    count = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
    head = model.get_output_embeddings()
    found = _find_layers(model.get_decoder() or model, count)
    if head is None or found is None:
        raise UnsupportedTarget(
            f"{type(model).__name__}: expected a causal language model with an LM head and a list "
            f"of {count} decoder layers; LM head: {'no' if head is None else 'yes'}, list of "
            f"layers: {'no' if found is None else 'yes'}"
        )
    base, layers = found
    embedding = model.get_input_embeddings()
    names = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm")
    norm = next((getattr(base, name) for name in names if hasattr(base, name)), None)
    return Anatomy(
        base=base,
        embedding=embedding,
        layers=layers,
        norm=norm,
        rotary=getattr(base, "rotary_emb", None),
        head=head,
        embedding_weight=embedding.get_parameter("weight"),
        head_weight=head.get_parameter("weight"),
    )


def _find_layers(root: nn.Module, count: int) -> tuple[nn.Module, nn.ModuleList] | None:
    """Search from the top for the list of decoder layers, and the module that owns it."""
    level = [root]
    while level:
        for owner in level:
            for child in owner.children():
                if isinstance(child, nn.ModuleList) and len(child) == count:
                    return owner, child
        level = [child for owner in level for child in owner.children()]
    return None


@dataclass(slots=True)
class ProbeReport:
    """What one forward pass with our attention function showed.

    Attributes:
        calls: times the function ran.
        windows: sliding window of each layer, by layer number.
        shapes: (key heads, key width, value width) of each layer, by layer number.
        unknown: keyword arguments that may change the result and that we do not serve.
        has_softcap: scores are capped.
        has_sinks: the softmax has an extra logit a head.
        non_causal: layers that look ahead.
    """

    calls: int = 0
    windows: dict[int, int | None] = field(default_factory=dict)
    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    has_softcap: bool = False
    has_sinks: bool = False
    non_causal: set[int] = field(default_factory=set)


@runtime_checkable
class _Pass(Protocol):
    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]: ...

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, **scoring: Any
    ) -> Tensor: ...

    def note(self, module: nn.Module, given: dict[str, Any]) -> None: ...


class _StepPass:
    """A pass over our KV buffers: indices once a pass, masks once a window."""

    def __init__(self, kv: KVBuffers, step: Step) -> None:
        self._kv = kv
        self._step = step
        self._flat = kv.flat_slots(step.rows, step.slots)
        count = step.rows.shape[0]
        in_order = torch.arange(count, device=step.rows.device)
        self._is_prefix = bool(torch.equal(step.rows, in_order))
        self._masks: dict[tuple[int | None, int], Tensor] = {}
        self._packed = None if step.segments is None else PackedAttention(step.segments)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._kv.write(layer, self._flat, keys, values)
        return self._kv.read(layer, self._step.rows, self._step.live, is_prefix=self._is_prefix)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, **scoring: Any
    ) -> Tensor:
        if self._packed is not None:
            return self._packed.attend(query, keys, values, window=window, **scoring)
        groups = query.shape[1] // keys.shape[1]
        if (window, groups) not in self._masks:
            self._masks[window, groups] = tile_mask(self._step.visible(window), groups)
        return attend(query, keys, values, self._masks[window, groups], **scoring)

    def note(self, module: nn.Module, given: dict[str, Any]) -> None:
        """Take no notes: the gate has looked already."""


# tensors and numbers that reach the attention function and may be ignored: positions are in the
# keys already, and the rest steers outputs or kernels we do not use
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "output_attentions", "use_cache", "cache", "is_causal"}
    | {"past_key_values", "position_embeddings", "logits_to_keep", "output_router_logits"}
    | {"sliding_window", "softcap", "s_aux", "layer_idx"}
)


class _ProbePass:
    """A pass without memory that writes down what the model asks of attention."""

    def __init__(self, report: ProbeReport, length: int, device: torch.device) -> None:
        self.report = report
        self._causal = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.report.shapes[layer] = (keys.shape[1], keys.shape[3], values.shape[3])
        return keys, values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, window: int | None, **scoring: Any
    ) -> Tensor:
        mask = tile_mask(self._causal, query.shape[1] // keys.shape[1])
        return attend(query, keys, values, mask, **scoring)

    def note(self, module: nn.Module, given: dict[str, Any]) -> None:
        report = self.report
        layer = getattr(module, "layer_idx", report.calls)
        report.windows[layer] = given["sliding_window"]
        report.has_softcap |= given["softcap"] is not None
        report.has_sinks |= given["s_aux"] is not None
        report.calls += 1
        if not getattr(module, "is_causal", True):
            report.non_causal.add(layer)
        for name, value in given.items():
            if name not in _HARMLESS and isinstance(value, Tensor | float):
                report.unknown.add(name)


class _Current:
    """The pass in progress and what its hooks collect. Shared by attention, cache and hooks."""

    def __init__(self) -> None:
        self.run: _Pass | None = None
        self.wanted: frozenset[int] = frozenset()
        self.taps: dict[int, Tensor] = {}
        self.wants_final = False
        self.final: Tensor | None = None

    def running(self) -> _Pass:
        if self.run is None:
            raise UnsupportedTarget(
                "the target's attention ran outside of a draftlab pass; call Target.run or "
                "Target.read_features instead of the model itself"
            )
        return self.run

    @contextmanager
    def collect(self, run: _Pass | None, request: FeatureRequest) -> Iterator[None]:
        """Hold a pass while the model runs, and let go of its tensors afterwards."""
        self.run = run
        self.wanted = frozenset(request.tap_layers)
        self.wants_final = request.wants_final
        try:
            yield
        finally:
            self.run, self.final = None, None
            self.wanted, self.wants_final = frozenset(), False
            self.taps = {}

    def features(self, request: FeatureRequest) -> TargetFeatures:
        taps = [self.taps[k] for k in request.tap_layers]
        return TargetFeatures(taps=torch.stack(taps, dim=2) if taps else None, final=self.final)


class _StepLayer(CacheLayerMixin):
    """One layer of a cache that keeps nothing itself and knows no length.

    Lengths differ by row, so whoever asks for "the" length would compute something wrong: raise.
    """

    is_sliding = False

    def __init__(self, current: _Current, layer: int) -> None:
        super().__init__()
        self._current = current
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to make: the buffers exist."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._current.running().store(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        raise UnsupportedTarget(
            "this model's code asks its cache for one sequence length; rows have lengths of their "
            "own here, so the answer would be wrong for some of them"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise UnsupportedTarget("this model builds its own attention mask from one cache length")

    def get_max_length(self) -> int:
        return -1


def _make_attention(current: _Current) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        run = current.running()
        if attention_mask is not None:
            raise UnsupportedTarget(
                f"{type(module).__name__} made an attention mask of its own of shape "
                f"{tuple(attention_mask.shape)}; only draftlab's mask knows the rows' lengths"
            )
        run.note(
            module, {**rest, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        )
        out = run.attend(
            query,
            key,
            value,
            sliding_window,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=s_aux,
        )
        return out, None

    return attention


@runtime_checkable
class Door(Protocol):
    """A way through the target's layers; all doors of a target compute the same function."""

    name: str

    def forward(
        self, kv: KVBuffers, step: Step, request: FeatureRequest, wants_logits: bool
    ) -> StepOutput:
        """Run new tokens of some rows, writing their keys and values."""
        ...


class HFDoor:
    """The reference way through a target: transformers' own modules over our memory.

    Starts detached, that is, with the attention transformers chose; `attach` puts ours in.

    Attributes:
        name: what reports call this path.
        model: the model, frozen by its owner.
        anatomy: its parts.
        is_attached: whether our attention function is in place.
        plain_attention: the transformers attention that `detach` gives back.
        takes_positions: whether the model takes a position for every token.
    """

    name = "reference"

    def __init__(self, model: PreTrainedModel) -> None:
        """Register an attention function for this model alone and hook its layers.

        Raises:
            UnsupportedTarget: the model has no LM head or no list of decoder layers.
        """
        self.model = model
        self.anatomy = find_anatomy(model)
        self.is_attached = False
        self.plain_attention: str = model.config._attn_implementation or "eager"
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            self.plain_attention = "eager"  # some versions' fused attention drops the cap
        self._current = current = _Current()
        arguments = inspect.signature(model.forward).parameters
        self._cache_word = "cache" if "cache" in arguments else "past_key_values"
        self.takes_positions = "position_ids" in arguments
        self._can_skip_logits = "logits_to_keep" in arguments
        layers: list[Any] = [_StepLayer(current, i) for i in range(len(self.anatomy.layers))]
        self._cache = Cache(layers=layers)
        # learned positions are a table: padding columns past its end must still be looked up
        self._last_position: int | None = None
        if self.anatomy.rotary is None:
            length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            self._last_position = length - 1 if length else None
        self._attention = f"draftlab_{next(_names)}"
        AttentionInterface.register(self._attention, _make_attention(current))
        weakref.finalize(self, AttentionInterface._global_mapping.pop, self._attention, None)
        _hook_taps(self.anatomy, current)

    def attach(self) -> None:
        """Put our attention function in place.

        Raises:
            UnsupportedTarget: the model does not take attention functions.
        """
        self._set_attention(self._attention)
        self.is_attached = True

    def detach(self) -> None:
        """Give transformers' own attention back."""
        self.is_attached = False
        self._set_attention(self.plain_attention)

    def _set_attention(self, name: str) -> None:
        self.model.set_attn_implementation(name)
        configs = [self.model.config]
        configs += [m.config for m in self.model.modules() if isinstance(m, PreTrainedModel)]
        if any(config._attn_implementation != name for config in configs):
            raise UnsupportedTarget(
                f"{type(self.model).__name__} runs attention code of its own and takes no function "
                "from outside"
            )

    def probe(self, length: int = 3) -> ProbeReport:
        """Run one short pass and write down what the model asks of attention."""
        device = self.anatomy.embedding_weight.device
        report = ProbeReport()
        ids = torch.ones(1, length, dtype=torch.long, device=device)
        positions = torch.arange(length, device=device).unsqueeze(0)
        nothing = FeatureRequest()
        with self._current.collect(_ProbePass(report, length, device), nothing):
            self._call(self.model, ids, positions)
        return report

    def forward(
        self, kv: KVBuffers, step: Step, request: FeatureRequest, wants_logits: bool
    ) -> StepOutput:
        """Run new tokens of some rows through the model.

        Args:
            kv: memory of the rows; the new keys and values are written at the step's slots.
            step: tokens, where they go and what they may see.
            request: hidden states to give back.
            wants_logits: also compute logits, for every column.
        """
        if step.live > kv.capacity:
            raise ShapeMismatch(
                f"a step reaches slot {step.live - 1} of rows with capacity {kv.capacity}; open "
                "the KV buffers with more capacity or stop the row earlier"
            )
        with self._current.collect(_StepPass(kv, step), request):
            extra = {} if wants_logits else self._without_logits(step.ids.device)
            output = self._call(self.model, step.ids, self._positions(step), **extra)
            logits = output.logits if wants_logits else None
            return StepOutput(logits=logits, features=self._current.features(request))

    def run_layers(
        self, kv: KVBuffers, step: Step, layers: tuple[int, ...]
    ) -> Float[Tensor, "R T D"]:
        """Run new tokens through some decoder layers only, in order; the others pass through.

        Returns:
            The residual stream after the last of them.
        """
        last = FeatureRequest((layers[-1] + 1,))
        skipped = [m for i, m in enumerate(self.anatomy.layers) if i not in layers]
        with self._current.collect(_StepPass(kv, step), last):
            try:
                for module in skipped:
                    module.forward = _pass_through
                self._call(self.anatomy.base, step.ids, self._positions(step))
            finally:
                for module in skipped:
                    del module.forward
            return self._current.taps[last.tap_layers[0]]

    def forward_plainly(
        self, ids: Int[Tensor, "R T"], request: FeatureRequest, wants_logits: bool
    ) -> StepOutput:
        """Run whole sequences with transformers' own attention and no memory.

        Causal models let no column see what is to its right, so shorter rows are padded there.
        """
        with self._current.collect(None, request):
            extra = {} if wants_logits else self._without_logits(ids.device)
            output = self.model(input_ids=ids, use_cache=False, **extra)
            logits = output.logits if wants_logits else None
            return StepOutput(logits=logits, features=self._current.features(request))

    def _call(self, module: nn.Module, ids: Tensor, positions: Tensor, **extra: Any) -> Any:
        extra[self._cache_word] = self._cache
        return module(input_ids=ids, position_ids=positions, use_cache=True, **extra)

    def _without_logits(self, device: torch.device) -> dict[str, Tensor]:
        if not self._can_skip_logits:
            return {}
        return {"logits_to_keep": torch.empty(0, dtype=torch.long, device=device)}

    def _positions(self, step: Step) -> Tensor:
        if self._last_position is None:
            return step.positions
        return step.positions.clamp(max=self._last_position)


def _pass_through(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden_states


def _hook_taps(anatomy: Anatomy, current: _Current) -> None:
    """Collect layer outputs; a hook must return nothing, or it would replace the output."""

    def tap(number: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if number in current.wanted:
                current.taps[number] = output[0] if isinstance(output, tuple) else output

        return hook

    def final(module: nn.Module, args: Any, output: Any) -> None:
        if current.wants_final:
            current.final = output[0]

    for index, layer in enumerate(anatomy.layers):
        layer.register_forward_hook(tap(index + 1))
    anatomy.base.register_forward_hook(final)
