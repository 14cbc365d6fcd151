"""What one process of a training run does, from its settings to the last checkpoint."""

import logging
import os
from typing import Any

import torch

from draftlab.cli.adapting import make_adapted
from draftlab.cli.collect import Collected, collect_samples, count_tokens
from draftlab.cli.continuing import record_downloaded, require_kind
from draftlab.cli.drafters import find_drafter_folder
from draftlab.cli.hardware import place_drafters
from draftlab.cli.probe import AcceptanceProbe
from draftlab.cli.probe_table import (
    describe_probes,
    list_probes,
    warn_of_few_prompts,
    warn_of_rising_loss,
)
from draftlab.cli.schema import RunSettings
from draftlab.cli.vocab_report import report_vocab
from draftlab.data.learning import mark_learned
from draftlab.data.packing import cut_samples, pack
from draftlab.drafters.base import Drafter, DraftVocabSettings, num_trainable
from draftlab.drafters.store import build_drafter, load_drafter
from draftlab.runs.metrics_log import MetricsLog, read_metrics
from draftlab.runs.run_dir import RunDir
from draftlab.runs.trackers import open_tracker
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import load_target
from draftlab.targets.target import Target
from draftlab.training.processes import start_accelerator
from draftlab.training.rows import TrainingRows
from draftlab.training.settings import TrainSettings
from draftlab.training.trainer import Trainer, TrainingResult

log = logging.getLogger(__name__)


def run_training(run: RunDir, settings: RunSettings) -> TrainingResult:
    """Collect the data, build or load the drafter, and train it; goes on where a run stopped.

    Args:
        run: the run's folder.
        settings: everything the run is.

    Raises:
        DraftlabError: anything wrong with data, target or drafter, before the first step.
    """
    target = _load_target(settings)
    collected = collect_samples(
        target,
        settings.data,
        settings.regenerate,
        settings.paths,
        needs=find_needs(settings, target),
        seed=settings.seed,
        is_first_rank=_is_first_rank(),
    )
    return train_drafter(run, settings, target, collected)


def _load_target(settings: RunSettings) -> Target:
    if settings.hardware.cuts_target:  # the processes must meet before they can share it
        start_accelerator(torch.device(settings.target.device), settings.train.precision)
    target = load_target(settings.target, is_sharded=settings.hardware.cuts_target)
    place_drafters(target, settings.hardware)
    return target


def find_needs(settings: RunSettings, target: Target) -> FeatureRequest:
    """Find the hidden states the drafter will read, before there is data to build it with.

    What a drafter reads does not depend on which tokens its vocabulary holds: one with all of them
    tells. It is put into training, where it looks for whatever else it reads there.
    """
    if settings.init is not None:
        view = target.drafter_view
        return load_drafter(find_drafter_folder(settings.init), view).train().needs
    drafter = settings.drafter
    if isinstance(drafter, DraftVocabSettings):
        drafter = drafter.model_copy(update={"draft_vocab_size": None})
    return build_drafter(drafter, target.drafter_view).train().needs


def make_drafter(
    run: RunDir, settings: RunSettings, target: Target, collected: Collected
) -> Drafter:
    """Build a new drafter, or load the one that is to be trained further or adapted.

    Raises:
        ConfigError: `init` names a drafter of another kind than `drafter`, or nothing to adapt.
        TargetMismatch: `init` was made for another target.
    """
    if settings.adapter.kind != "none":
        drafter = make_adapted(run, settings, target)
    elif settings.init is None:
        counts = count_tokens(collected.samples, target.spec.vocab_size)
        return build_drafter(settings.drafter, target.drafter_view, counts, seed=settings.seed)
    else:
        # its own settings and draft vocabulary stay: another vocabulary would give every output
        # row another meaning (case O-19)
        drafter = load_drafter(find_drafter_folder(settings.init), target.drafter_view)
    if settings.init is not None:
        require_kind(settings.init, drafter.settings, settings.drafter)
        if _is_first_rank():
            record_downloaded(run, settings, drafter.settings)
    return drafter


def train_drafter(
    run: RunDir,
    settings: RunSettings,
    target: Target,
    collected: Collected,
    *,
    train: TrainSettings | None = None,
) -> TrainingResult:
    """Train on what was collected; `train` replaces the settings' own limits."""
    train = train or settings.train
    drafter = make_drafter(run, settings, target, collected)
    vocab = getattr(drafter, "vocab", None)
    is_new = settings.init is None and settings.adapter.kind == "none"
    target.run_on_first(
        lambda: report_vocab(vocab, target, collected, is_chosen_here=is_new),
        is_first=_is_first_rank(),
    )
    samples = mark_learned(collected.samples, settings.data.learn)
    cut = cut_samples(samples, train.row_tokens)
    if cut.num_cut:
        log.info(
            "%d samples were cut at train.row_tokens=%d, %d of them had nothing left to learn",
            cut.num_cut,
            train.row_tokens,
            len(cut.lost),
        )
    rows = TrainingRows(pack(cut.samples, train.row_tokens), captured=collected.captured)
    probe = AcceptanceProbe(
        target, collected.validation, settings.decode, run.path / "probe_costs.json"
    )
    can_probe = probe.num_prompts > 0 and target.speculation_refusal is None
    few = warn_of_few_prompts(probe.num_prompts, train.best_by)
    if can_probe and few is not None and _is_first_rank():
        log.warning(few)
    metrics = MetricsLog(run.metrics_path) if _is_first_rank() else None
    config = settings.model_dump(mode="json")
    tracker = open_tracker(settings.tracker, run, config) if _is_first_rank() else None

    def write(step: int, split: str, **numbers: float) -> None:
        if metrics is not None and tracker is not None:
            metrics.log(step, split, **numbers)
            tracker.log(step, split, numbers)

    log.info(
        "drafter %s: %s trainable parameters, %d packed rows",
        drafter.kind,
        f"{num_trainable(drafter):,}",
        len(rows),
    )
    trainer = Trainer(
        drafter,
        target,
        rows,
        optim=settings.optim,
        train=train,
        seed=settings.seed,
        folder=run.checkpoints_path,
        on_checkpoint=probe if can_probe else None,
        metrics=write,
        resume_from=run.checkpoints_path,
        origin=_origin(run, settings, collected, train),
        is_sharded=settings.hardware.cuts_drafter,
    )
    try:
        result = trainer.run()
    finally:
        if metrics is not None:
            metrics.close()
        if tracker is not None:
            tracker.close()
    if _is_first_rank():
        _conclude(read_metrics(run.metrics_path), train.best_by)
    return result


def _conclude(numbers: list[dict[str, Any]], best_by: str) -> None:
    """Say what the numbers of the whole run amount to."""
    if probes := list_probes(numbers):
        log.info("%s", describe_probes(probes, best_by))
    if warning := warn_of_rising_loss(numbers):
        log.warning(warning)


def _origin(
    run: RunDir, settings: RunSettings, collected: Collected, train: TrainSettings
) -> dict[str, Any]:
    return {
        "run": run.path.name,
        "data": collected.facts,
        "optim": settings.optim.model_dump(mode="json"),
        "train": train.model_dump(mode="json"),
        "seed": settings.seed,
        "init": settings.init,
        "adapter": None if settings.adapter.kind == "none" else settings.adapter.model_dump(),
    }


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
