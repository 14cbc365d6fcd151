"""The gate: may this target decode speculatively, exactly?

In: a model behind its reference door. Out: `Admission`. Refuses instead of degrading: a target it
refuses still trains drafters and answers plainly. Read admit first; it asks in turn what the config
says, what a probe pass shows, and what the numbers say (self_check.py).
"""

from dataclasses import dataclass, field
from typing import Any

from draftlab.errors import UnsupportedTarget
from draftlab.targets.adapter import HFDoor, ProbeReport
from draftlab.targets.model_view import ModelView
from draftlab.targets.self_check import check_numbers

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn", "longrope", "proportional"})


@dataclass(frozen=True, slots=True)
class Admission:
    """The gate's answer.

    Attributes:
        refusal: why rejected drafts could not be taken back exactly, or None.
        kv_shape: (key heads, head width) of our memory, or None where it cannot be used.
        report: what was found, as plain data.
    """

    refusal: str | None
    kv_shape: tuple[int, int] | None
    report: dict[str, Any] = field(default_factory=dict)


def admit(reference: HFDoor, view: ModelView) -> Admission:
    """Decide whether a target may decode over our memory, and prove it on a few tokens.

    Leaves our attention attached when admitted, transformers' own when refused.
    """
    report: dict[str, Any] = {"model_type": view.config["model_type"]}
    refusal = refusal_of_config(reference)
    if refusal is None:
        try:
            reference.attach()
            probe = reference.probe()
            refusal = refusal_of_probe(reference, probe)
            if refusal is None:
                shape = probe.shapes[0][:2]
                report |= check_numbers(reference, view, probe, shape)
                return Admission(None, shape, report)
        except (UnsupportedTarget, ValueError, AttributeError, TypeError, RuntimeError) as error:
            # strange model code fails in ways of its own; each is a reason, none is our bug to hide
            refusal = f"a pass over draftlab's memory failed: {type(error).__name__}: {error}"
        reference.detach()
    report["refusal"] = refusal
    return Admission(refusal, None, report)


def refusal_of_config(reference: HFDoor) -> str | None:
    """Say why a model's config or signature rules out exact rollback, or None."""
    model = reference.model
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if not reference.takes_positions:
        return (
            "its forward takes no position_ids: it carries a recurrent state, or counts positions "
            "itself, and neither can be taken back by a row"
        )
    types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if types:
        return (
            f"it has layers of type {', '.join(sorted(types))}; only full and sliding-window "
            "attention can forget rejected tokens exactly"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share the keys and values of others"
    for name in ("use_bidirectional_attention", "attention_chunk_size"):
        if getattr(config, name, None):
            return f"its config sets {name}={getattr(config, name)!r}"
    for rope in _rope_entries(config):
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            return (
                "its rope type is 'dynamic': the rotary table changes with the longest sequence of "
                "the batch, so keys in memory would belong to another table"
            )
        if kind not in _ROPE_TYPES:
            return f"its rope type {kind!r} is not known to keep one table for all lengths"
    return None


def refusal_of_probe(reference: HFDoor, probe: ProbeReport) -> str | None:
    """Say why what a probe pass showed rules out exact rollback, or None."""
    count = len(reference.anatomy.layers)
    config = reference.model.config.get_text_config()
    if probe.calls != count or sorted(probe.shapes) != list(range(count)):
        return (
            f"attention ran {probe.calls} times and stored keys for {len(probe.shapes)} layers in "
            f"a pass of {count} layers: some layers run code of their own"
        )
    if probe.unknown:
        return (
            f"its attention takes {', '.join(sorted(probe.unknown))}, which draftlab does not serve"
        )
    if probe.non_causal:
        return f"layers {sorted(probe.non_causal)} look ahead"
    shapes = set(probe.shapes.values())
    if len(shapes) > 1 or any(width != value_width for _, width, value_width in shapes):
        return f"its layers keep keys and values of different shapes: {sorted(shapes)}"
    expected = _windows_of(config, count)
    asked = [probe.windows[i] for i in range(count)]
    if expected is not None and expected != asked:
        return f"its layers ask for windows {asked}, but its config says {expected}"
    return None


def _rope_entries(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in rope.values() if isinstance(entry, dict)]
    return nested or [rope]


def _windows_of(config: Any, count: int) -> list[int | None] | None:
    """Windows as the config tells them, or None where it does not say them layer by layer."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return None
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in types[:count]]
