"""What a device must hold, stage by stage: estimated from sizes, nothing is measured.

Weights, moments, gradients and key-value memory are counted; activations follow the inputs and
outputs of the drafter's matrices. Read forecast_memory.
"""

from draftlab.cli.estimate import Estimate, bytes_of_number
from draftlab.cli.passes import passes_of_body, passes_of_head
from draftlab.cli.schema import RunSettings
from draftlab.targets.outline import Outline

Parts = dict[str, int | float]  # bytes by name

_WIDE = 4  # bytes of a trained weight, its gradient and each of its moments
# bytes kept for the backward pass by every input and output of a matrix, what norms, activation
# functions and residuals keep beside them included: counted on small models of all kinds
_KEPT_BYTES = {"no": 5.0, "bf16": 3.6}
# numbers that objectives/chunked.py keeps alive at once
_LOSS_NUMBERS = {"cpu": 20_000_000, "cuda": 160_000_000}
_LOSS_ROWS = 32
_LAYERS_IN_FLIGHT = 2  # of a target that is cut over processes: one computes, one is gathered
_PROMPT_TOKENS = 512  # of an encoder's prompt, whose keys and values are kept beside


def forecast_memory(settings: RunSettings, estimate: Estimate) -> dict[str, Parts]:
    """Estimate the bytes a device holds while prompts are answered, in training, or decoding.

    Args:
        settings: everything the run is.
        estimate: with an outline; without one nothing can be told.

    Returns:
        Stages, each with its parts by name.
    """
    outline = estimate.outline
    if outline is None:
        return {}
    number = bytes_of_number(estimate.dtype)
    weights = _target_parts(settings, outline, number)
    stages: dict[str, Parts] = {}
    drafter = estimate.drafter
    if drafter is not None and drafter.num_trainable == 0:
        rows, length = settings.eval.batch_size, _PROMPT_TOKENS + settings.eval.max_new_tokens
        both = outline.kv_width + drafter.kv_width
        return {
            "decoding": weights
            | {
                "drafter weights": drafter.num_parameters * number,
                f"keys and values of {rows} rows": rows * length * both * number,
            }
        }
    if estimate.workload is not None and estimate.workload.is_answered_here:
        rows, length = settings.regenerate.batch_size, settings.data.max_tokens
        stages["answering"] = weights | {
            f"keys and values of {rows} rows": rows * length * outline.kv_width * number
        }
    if drafter is not None:
        work = _training_parts(settings, estimate, outline, number)
        target = {name: size for name, size in work.items() if name.startswith("target ")}
        own = {name: size for name, size in work.items() if name not in target}
        if settings.hardware.drafter_device is None:
            stages["training"] = weights | own | target
        else:
            stages["training, device of the target"] = weights | target
            stages["training, device of the drafter"] = own
    return stages


def _target_parts(settings: RunSettings, outline: Outline, number: int) -> Parts:
    hardware = settings.hardware
    total = outline.num_parameters
    if not hardware.cuts_target:
        copies = outline.num_packed if hardware.kind == "cpu" else outline.num_fused
        parts: Parts = {"target weights": total * number}
        if copies and settings.target.kernels != "reference":
            parts["its fused kernels' copies"] = copies * number
        return parts
    layer = outline.num_in_layers / outline.num_layers
    share = outline.num_in_layers / hardware.num_processes
    return {
        "target weights, its share": (total - outline.num_in_layers + share) * number,
        "target layers put together": _LAYERS_IN_FLIGHT * layer * number,
    }


def _training_parts(
    settings: RunSettings, estimate: Estimate, outline: Outline, number: int
) -> Parts:
    drafter, train, hardware = estimate.drafter, settings.train, settings.hardware
    assert drafter is not None, "asked for where there is one"
    share = hardware.num_processes if hardware.cuts_drafter else 1
    trained = drafter.num_trainable * _WIDE
    parts: Parts = {
        "drafter weights": drafter.num_parameters * _WIDE / share,
        "gradients": trained / share,
        "optimizer state": count_moments(settings, estimate) * _WIDE / share,
    }
    if hardware.cuts_drafter:
        parts["drafter put together"] = drafter.num_parameters * _WIDE + trained
    elif hardware.num_processes > 1:
        parts["gradients on their way"] = trained
    rows = train.batch_rows * train.row_tokens
    sample = estimate.workload.sample_tokens if estimate.workload else train.row_tokens
    work = 2 if train.precision == "bf16" else _WIDE
    kept = drafter.num_kept * _KEPT_BYTES[train.precision]
    if train.gradient_checkpointing:  # what enters a layer, and one layer that is computed anew
        layers = max(1, drafter.num_layers)
        kept = kept / layers + layers * drafter.width * _WIDE
    parts["activations"] = rows * passes_of_body(settings.drafter, sample) * kept
    parts["head inputs and their gradients"] = (
        2 * rows * passes_of_head(settings.drafter, sample) * drafter.width * work
    )
    parts["loss chunk"] = _loss_bytes(settings, outline)
    vectors = len(drafter.needs.tap_layers) + drafter.needs.wants_final
    parts["target features"] = 2 * rows * vectors * outline.hidden_size * number
    if not _are_captured(settings):
        parts["target pass"] = rows * (outline.kv_width + outline.layer_width) * number
    return parts


def count_moments(settings: RunSettings, estimate: Estimate) -> int:
    """Count the numbers of the optimizer's state: two a weight, for Muon's matrices one."""
    drafter = estimate.drafter
    if drafter is None:
        return 0
    moments = 2 * drafter.num_trainable
    if settings.optim.kind == "muon":
        moments -= drafter.num_matrices
    if settings.optim.ema_decay is not None:
        moments += drafter.num_trainable
    return moments


def _loss_bytes(settings: RunSettings, outline: Outline) -> int:
    device = "cpu" if settings.hardware.kind == "cpu" else "cuda"
    width = getattr(settings.drafter, "draft_vocab_size", None) or outline.vocab_size
    a_row = 2 * outline.vocab_size + 10 * width
    return _WIDE * max(_LOSS_NUMBERS[device], _LOSS_ROWS * a_row)


def _are_captured(settings: RunSettings) -> bool:
    return settings.data.answers == "target" and settings.regenerate.capture_features
