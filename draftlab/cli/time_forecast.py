"""How long answers and training may take on a named accelerator: arithmetic, nothing is measured.

Answers are decoded as fast as weights and key-value memory are read, or multiplied where that is
slower; training multiplies. Shares of the peak are assumptions: trainers of this kind report 44 %
of it (SpecForge's Domino trainer on H200), decoders 69 % of the bandwidth (gpt-fast on A100).
"""

import math
from dataclasses import dataclass

from draftlab.cli.accelerators import Accelerator
from draftlab.cli.estimate import Estimate, Workload, bytes_of_number
from draftlab.cli.passes import passes_of_body, passes_of_head
from draftlab.cli.schema import RunSettings
from draftlab.targets.outline import Outline

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.5
_HOUR = 3600.0
_JUDGED = 1 / 8  # of the predictions are compared with the target's whole law
_FORWARD, _TRAINED, _RECOMPUTED = 2, 6, 8  # operations a weight: one way, with gradients, and twice


@dataclass(frozen=True, slots=True)
class TimeForecast:
    """Hours, at answers of full length.

    Attributes:
        answers: the target answers; None where the data has answers or nothing is known.
        answer_tokens: how many it may write.
        training: optimizer steps, without probes and checkpoints.
        training_tokens: how many pass in that time, all epochs together; None where minutes alone
            end it.
        plain_tokens_per_s: plain decoding at batch 1, the pace that drafts are to beat; None where
            nothing is known.
    """

    answers: float | None
    answer_tokens: int
    training: float | None
    training_tokens: float | None
    plain_tokens_per_s: float | None


def forecast_time(
    settings: RunSettings, estimate: Estimate, accelerator: Accelerator
) -> TimeForecast:
    """Estimate hours on a number of accelerators, one a process."""
    outline, workload = estimate.outline, estimate.workload
    if outline is None:
        return TimeForecast(None, 0, None, None, None)
    plain = 1 / _step_s(settings, estimate, outline, 1, 0.0, accelerator)
    if workload is None or estimate.trains_nothing:
        return TimeForecast(None, 0, None, None, plain)
    answers, tokens = None, 0
    if workload.is_answered_here and outline.refusal is None:
        tokens = workload.num_answers * settings.regenerate.max_new_tokens
        answers = _answer_s(settings, estimate, outline, workload, accelerator) / _HOUR
    trained = training_tokens(settings, workload)
    training = None
    if estimate.drafter is not None and estimate.drafter.num_trainable:
        minutes = settings.train.max_minutes
        limit = math.inf if minutes is None else minutes / 60
        training = limit
        if trained is not None:
            whole = _training_s(settings, estimate, outline, trained, accelerator) / _HOUR
            training = min(limit, whole)
            if limit < whole:
                trained *= limit / whole
    return TimeForecast(answers, tokens, training, trained, plain)


def _answer_s(
    settings: RunSettings,
    estimate: Estimate,
    outline: Outline,
    workload: Workload,
    accelerator: Accelerator,
) -> float:
    """Time decoding by one process: the first answers, the others wait or lend their shards."""
    rows, length = settings.regenerate.batch_size, settings.regenerate.max_new_tokens
    held = workload.sample_tokens - length / 2
    step = _step_s(settings, estimate, outline, rows, held, accelerator)
    prompts = _FORWARD * outline.num_active * (workload.sample_tokens - length)
    prefill = prompts / (FLOPS_SHARE * accelerator.flops)
    return workload.num_answers * (length * step / rows + prefill)


def _step_s(
    settings: RunSettings,
    estimate: Estimate,
    outline: Outline,
    rows: int,
    held: float,
    accelerator: Accelerator,
) -> float:
    """Time one token of every row, when rows hold so many tokens."""
    number = bytes_of_number(estimate.dtype)
    chosen, among = outline.experts
    met = 1 - (1 - chosen / among) ** rows if among > 1 else 1  # of the experts, by some row
    dense = outline.num_decoder - outline.num_experts_weights
    read = (dense + outline.num_experts_weights * met) * number
    read += rows * held * outline.kv_width * number
    return max(
        read / (BANDWIDTH_SHARE * accelerator.bytes_per_s),
        _FORWARD * outline.num_active * rows / (FLOPS_SHARE * accelerator.flops),
        _gather_s(settings, estimate, outline, accelerator),
    )


def _training_s(
    settings: RunSettings,
    estimate: Estimate,
    outline: Outline,
    tokens: float,
    accelerator: Accelerator,
) -> float:
    drafter, train = estimate.drafter, settings.train
    assert drafter is not None, "asked for where there is one"
    sample = estimate.workload.sample_tokens if estimate.workload else train.row_tokens
    size = getattr(settings.drafter, "draft_vocab_size", None)
    body = _RECOMPUTED if train.gradient_checkpointing else _TRAINED
    draft = body * drafter.num_multiplied * passes_of_body(settings.drafter, sample)
    heads = (size or outline.vocab_size) * drafter.width
    ways = _TRAINED if drafter.num_heads else _TRAINED - _FORWARD  # a frozen head has no gradient
    draft += ways * heads * passes_of_head(settings.drafter, sample)
    judge = outline.vocab_size * (_JUDGED if size else 1) + (size or 0)
    judge *= _FORWARD * outline.hidden_size
    target = 0.0
    is_captured = settings.regenerate.capture_features and settings.data.answers == "target"
    head = outline.vocab_size * outline.hidden_size
    if not is_captured:
        target = _FORWARD * (outline.num_active - head)
    speed = FLOPS_SHARE * accelerator.flops
    batch = train.batch_rows * train.row_tokens
    pass_s = batch * target / speed
    if not is_captured:  # in a mixture of experts, reading them all may take longer
        read = outline.num_in_layers * bytes_of_number(estimate.dtype)
        read_s = read / (BANDWIDTH_SHARE * accelerator.bytes_per_s)
        pass_s = max(pass_s, read_s, _gather_s(settings, estimate, outline, accelerator))
    batches = tokens / batch / settings.hardware.num_processes
    return batches * (pass_s + batch * (draft + judge) / speed)


def _gather_s(
    settings: RunSettings, estimate: Estimate, outline: Outline, accelerator: Accelerator
) -> float:
    """Time putting all layers of a cut target together, as every pass does."""
    if not settings.hardware.cuts_target:
        return 0.0
    others = 1 - 1 / settings.hardware.num_processes
    moved = outline.num_in_layers * bytes_of_number(estimate.dtype) * others
    return moved / (BANDWIDTH_SHARE * accelerator.link_bytes_per_s)


def training_tokens(settings: RunSettings, workload: Workload) -> float | None:
    """Compute how many tokens pass in training; None where minutes alone end it."""
    train = settings.train
    limits: list[float] = []
    if train.max_epochs is not None:
        limits.append(train.max_epochs * workload.num_tokens)
    if train.max_steps is not None:
        rows = train.batch_rows * train.accumulation * settings.hardware.num_processes
        limits.append(float(train.max_steps * rows * train.row_tokens))
    return min(limits, default=None)
