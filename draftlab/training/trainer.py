"""Trains a drafter for a frozen target.

In: a drafter, its target, packed rows. Out: checkpoints, numbers, and the best one by the real
acceptance length that the caller measures. Read `Trainer.run` first.

What a step computes does not depend on how its rows are cut into processes and batches: the loss
is the sum over the step's sequences divided by their number, over all processes (case O-22), or,
where a drafter averages tokens, over its predictions divided by their weight; the learning rate
follows optimizer steps (O-23), and noise is keyed by sample. Everything that a step depends on is
in the checkpoint or a function of (seed, step), so a killed run goes on bit for bit (O-20). A time
limit alone hangs on the clock (time_limit.py).
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.optim import Optimizer

from draftlab.drafters.adapters import merged
from draftlab.drafters.base import Drafter
from draftlab.drafters.store import save_drafter
from draftlab.errors import CheckpointError, ConfigError, DraftlabError
from draftlab.randomness import Noise
from draftlab.shapes import Tensor
from draftlab.targets.sharding import whole_tensor
from draftlab.targets.target import Target
from draftlab.training.averaging import WeightAverage
from draftlab.training.checkpoints import (
    CheckpointFolder,
    Progress,
    read_progress,
    read_state,
    write_state,
)
from draftlab.training.loss import DrafterLoss
from draftlab.training.meter import Meter
from draftlab.training.optim import build_optimizers, set_lr, trainable_parameters
from draftlab.training.plan import TrainingPlan, steps_within_limits
from draftlab.training.processes import start_accelerator
from draftlab.training.progress import ProgressDisplay
from draftlab.training.recompute import recompute_layers
from draftlab.training.rows import TrainingRows
from draftlab.training.sampler import RowOrder
from draftlab.training.schedule import lr_factor
from draftlab.training.settings import OptimSettings, TrainSettings
from draftlab.training.sharding import gather_weights, shard_loss, weights_in_place
from draftlab.training.state import TrainingState
from draftlab.training.time_limit import TimeLimit

log = logging.getLogger(__name__)

Probe = Callable[[int, Drafter], dict[str, float] | None]
LogNumbers = Callable[..., None]

_KEPT_CHANGE = 0.05  # of the steps left: less is the noise of a clock


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """How a training ended.

    Attributes:
        total_steps: optimizer steps done, over all resumes; fewer than planned when `patience`
            ended the training.
        latest: the last checkpoint.
        best: the checkpoint whose probe was best; the last one when nothing was probed.
        best_tau: its acceptance length, or None.
    """

    total_steps: int
    latest: Path
    best: Path
    best_tau: float | None


@dataclass(frozen=True, slots=True)
class _Best:
    """The best probe so far: its step, what it was judged by, and its acceptance length."""

    step: int
    score: float
    tau: float | None


class Trainer:
    """Runs optimizer steps, and writes checkpoints that a killed run resumes from exactly."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        rows: TrainingRows,
        *,
        optim: OptimSettings,
        train: TrainSettings,
        seed: int,
        folder: Path,
        on_checkpoint: Probe | None = None,
        metrics: LogNumbers | None = None,
        resume_from: Path | None = None,
        origin: dict[str, Any] | None = None,
        is_sharded: bool = False,
    ) -> None:
        """Check everything that can be checked before the first step.

        Args:
            drafter: trained in place; its weights become float32 at least. With adapters, those
                alone are trained, averaged and saved, and it is probed with them merged.
            target: frozen; never prepared, never given to an optimizer.
            rows: packed rows.
            optim: how weights move.
            train: how long, and in what portions.
            seed: the run's seed; order and noise hang on it.
            folder: where checkpoints go (the run's `checkpoints`).
            on_checkpoint: called on the first process with (step, drafter in eval mode) for every
                probe; may return numbers. The highest "tau", or whatever `train.best_by` names,
                makes the best checkpoint, of equals the last.
            metrics: called on the first process as metrics(step, split, **numbers).
            resume_from: `folder` itself to go on from its latest checkpoint (or to start, when it
                has none), or one of its step-* folders; None to start anew.
            origin: plain data to keep in every saved drafter, such as recipe and data report.
            is_sharded: cut weights and moments over the processes (sharding.py).

        Raises:
            ConfigError: nothing to train, patience with nothing to probe, or processes that this
                trainer does not know.
            DataError: captured features do not hold what the drafter needs.
            CheckpointError: `folder` belongs to another training.
        """
        self.drafter = drafter
        self.target = target
        self.rows = rows
        self.optim = optim
        self.train = train
        self.seed = seed
        self._on_checkpoint = on_checkpoint
        self._metrics = metrics
        self._origin = origin or {}
        if train.patience is not None and on_checkpoint is None:
            raise ConfigError(
                f"train.patience={train.patience} waits for better probes, but nothing can be "
                "probed: no validation prompts, or a target that cannot decode drafts; pass "
                "train.patience=null, or hold prompts out (data.validation_fraction)"
            )
        self._parameters = trainable_parameters(drafter)
        rows.check_captured(drafter.needs)
        self._folder = CheckpointFolder(folder)
        self._resume_from = self._choose_checkpoint(resume_from)

        self.accelerator = start_accelerator(drafter.target.device, train.precision)
        drafter.to(self.accelerator.device)
        _keep_float32(drafter)
        if train.gradient_checkpointing:
            recompute_layers(drafter)
        self._order = RowOrder(
            num_rows=len(rows),
            seed=seed,
            batch_rows=train.batch_rows,
            accumulation=train.accumulation,
            num_processes=self.accelerator.num_processes,
        )
        self._plan = self._make_plan(is_resumed=resume_from is not None)
        self._is_sharded = is_sharded
        self._loss, self._optimizers, self._prepared = self._spread_over_processes()
        self._average: WeightAverage | None = None
        self._best: _Best | None = None
        self._idle_probes = 0
        self._done = 0
        self._time: TimeLimit | None = None
        # all have looked at the folder before the first of them writes there
        self.accelerator.wait_for_everyone()

    def _spread_over_processes(self) -> tuple[Any, list[Optimizer], list[Any]]:
        """Wrap the loss so that all processes take the same steps, and build the optimizers."""
        loss = DrafterLoss(self.drafter)
        if not self._is_sharded:
            optimizers = build_optimizers(self.drafter, self.optim)
            wrapped, *prepared = self.accelerator.prepare(loss, *optimizers)
            return wrapped, optimizers, prepared
        if self.accelerator.num_processes == 1:
            raise ConfigError(
                "hardware.shard=drafter cuts a drafter over processes, and there is one; pass "
                "hardware.shard=none, or hardware.num_processes=N"
            )
        sharded = shard_loss(loss, self.accelerator.device)
        self._parameters = trainable_parameters(self.drafter)  # they are shards from here on
        optimizers = build_optimizers(self.drafter, self.optim)
        return sharded, optimizers, [*optimizers]

    def run(self) -> TrainingResult:
        """Train to the end of the plan, from the start or from where a checkpoint left off.

        Raises:
            DraftlabError: the gradient is no longer a number.
        """
        self.drafter.train()
        self._fix_total_steps()
        if self.optim.ema_decay is not None:
            self._average = WeightAverage(self._parameters, self.optim.ema_decay)
        if self._resume_from is not None:
            self._done = self._restore(self._resume_from)
        display = ProgressDisplay(
            done=self._done,
            total=self._plan.total_steps,
            is_shown=self.accelerator.is_main_process,
        )
        meter = Meter(self.accelerator.device, self.accelerator.num_processes)
        with display.running():
            while self._done < self._plan.total_steps and not self._is_out_of_patience():
                step = self._done + 1
                factor = lr_factor(step, self._plan.total_at(step), self.optim)
                grad_norm = self._step(step, factor, meter)
                display.advance()
                self._look_at_pace(step, display)
                if self._average is not None:
                    self._average.update(step)
                saves = self._saves_at(step)
                # also before every checkpoint: sums in flight are not part of the state
                if saves or step % self.train.log_every_steps == 0:
                    numbers = meter.read() | {
                        "train/lr": self.optim.lr * factor,
                        "train/grad_norm": grad_norm,
                        "train/epoch": step / self._order.steps_per_epoch,
                    }
                    self._log(step, "train", numbers)
                    display.show(step, numbers)
                self._done = step
                if saves:
                    with display.paused():
                        self._checkpoint(step)
        return self._result()

    def rehearse(self, count: int) -> float:
        """Do steps without effect; give the tokens a second that went through them.

        One more is done first, which pays for warming up and is not counted.
        """
        self.drafter.train()
        self._rehearse(1)
        steps = range(2, 2 + count)
        seconds = sum(self._rehearse(step) for step in steps)
        return sum(self.rows.num_tokens(self._order.rows(step)) for step in steps) / seconds

    def _is_out_of_patience(self) -> bool:
        patience = self.train.patience
        if patience is None or self._idle_probes < patience:
            return False
        log.info("no better %s in %d probes: training ends here", self.train.best_by, patience)
        return True

    def _step(self, step: int, factor: float, meter: Meter | None) -> float:
        """Do one optimizer step and return the norm of the full gradient, before clipping."""
        start = time.perf_counter()
        rows = self._order.rows(step)
        num_sequences = sum(self.rows.num_sequences[row] for row in rows)
        # Accelerate averages gradients over processes, so each brings its sum times their number
        scale = self.accelerator.num_processes / max(1, num_sequences)
        noise = Noise(self.seed, self._order.epoch(step))
        batches = self._order.batches(step, self.accelerator.process_index)
        weight = torch.zeros((), dtype=torch.float64, device=self.accelerator.device)
        for number, batch_rows in enumerate(batches, start=1):
            is_last = number == len(batches)
            with self._syncing(is_last):
                total, loss = self._forward(batch_rows, noise)
                # not by Accelerate, which divides by ACCELERATE_GRADIENT_ACCUMULATION_STEPS
                (total * scale).backward()
            if self.drafter.averages_tokens and loss is not None:
                assert loss.weight is not None, "a drafter that averages tokens weighs every loss"
                weight += loss.weight.detach()
            if meter is not None:
                meter.add_batch(loss)
        if self.drafter.averages_tokens:
            self._average_tokens(weight, num_sequences)
        limit = math.inf if self.optim.clip_norm is None else self.optim.clip_norm
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), limit)
        grad_norm = float(whole_tensor(norm))  # the one wait for the device in a step
        if not math.isfinite(grad_norm):
            raise DraftlabError(
                f"the gradient of optimizer step {step} has norm {grad_norm}, so the weights would "
                "be lost; lower optim.lr, set optim.clip_norm, or try train.precision=no; "
                + (
                    f"no checkpoint was written yet in {self._folder.root}"
                    if self._folder.latest() is None
                    else f"the last checkpoint in {self._folder.root} is sound"
                )
            )
        set_lr(self._optimizers, factor)
        for optimizer in self._prepared:
            optimizer.step()
            optimizer.zero_grad()
        if meter is not None:
            seconds = time.perf_counter() - start
            meter.add_step(
                num_sequences=num_sequences,
                num_tokens=self.rows.num_tokens(rows),
                seconds=seconds,
            )
            if self._time is not None:
                self._time.add_step(seconds)
        return grad_norm

    def _average_tokens(self, weight: Tensor, num_sequences: int) -> None:
        """Turn the gradient of a mean over sequences into that of a mean over predictions.

        How much these weigh is known when all batches of all processes are done, and not before:
        it may hang on what was sampled, or on the drafter's own law.
        """
        if self.accelerator.num_processes > 1:
            distributed.all_reduce(weight)
        total = float(weight)
        if total > 0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(max(1, num_sequences) / total)

    def _forward(self, rows: list[int | None], noise: Noise) -> Any:
        batch = self.rows.tokens(rows).to(self.accelerator.device)
        learns = any(row is not None and self.rows.num_sequences[row] for row in rows)
        needs, features = self.drafter.needs, None
        if learns:
            features = self.rows.features(rows, batch, needs, self.target)
        else:
            self.rows.skip_features(needs, self.target)
        with self.accelerator.autocast() if self._is_sharded else nullcontext():
            return self._loss(batch, features, noise)

    def _syncing(self, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients over processes after the last batch of a step only."""
        if self._is_sharded:
            self._loss.set_requires_gradient_sync(is_last)
            return nullcontext()
        return nullcontext() if is_last else self.accelerator.no_sync(self._loss)

    def _choose_checkpoint(self, resume_from: Path | None) -> Path | None:
        root = self._folder.root
        if resume_from is not None:
            if resume_from.resolve() == root.resolve():
                return self._folder.latest()
            if resume_from.resolve().parent == root.resolve():
                return resume_from
            raise CheckpointError(
                f"resume_from={resume_from} is not in {root}; a training is resumed in its own "
                "folder (init=DRAFTER starts a new one from the weights of another)"
            )
        if (root / "plan.json").exists() or self._folder.latest() is not None:
            raise CheckpointError(
                f"{root} already holds a training; resume it (resume_from={root}), or train in a "
                "new folder"
            )
        return None

    def _make_plan(self, *, is_resumed: bool) -> TrainingPlan:
        limits = {"max_steps", "max_epochs", "max_minutes", "precision"}
        steps = steps_within_limits(self.train, self._order.steps_per_epoch)
        plan = TrainingPlan(
            drafter=self.drafter.settings.model_dump(mode="json"),
            target_checksum=self.target.spec.checksum,
            optim=self.optim.model_dump(mode="json"),
            limits=self.train.model_dump(mode="json", include=limits),
            rows_checksum=self.rows.checksum(),
            seed=self.seed,
            step_rows=self._order.step_rows,
            total_steps=steps or 0,
            adapter=None if self.drafter.adapter is None else self.drafter.adapter.describe(),
        )
        return plan.resume(self._folder.root) if is_resumed else plan

    def _fix_total_steps(self) -> None:
        if self.train.max_minutes is not None:
            self._follow_clock(self.train.max_minutes)
        if self.accelerator.is_main_process:
            self._plan.write(self._folder.root)

    def _follow_clock(self, minutes: float) -> None:
        """Start the time limit, or let it go on from where the checkpoint left off."""
        if self._resume_from is None:
            # also where a kill left plan.json alone: nothing is done, and nothing is spent
            self._time = TimeLimit(minutes, agree=self._agree)
            fitting = self._time.measure(self._rehearse)
            total = self._within_limits(fitting)
            self._plan = replace(self._plan, total_steps=total, looks=())
            log.info("%g minutes allow %d optimizer steps; training %d", minutes, fitting, total)
            return
        progress = read_progress(self._resume_from)
        if progress.spent_s is None:
            total = self._plan.total_steps or progress.total_steps
            self._plan = replace(self._plan, total_steps=total)
            log.info(
                "going on to step %d as planned: this checkpoint is of an older version and does "
                "not tell how much of train.max_minutes=%g is spent",
                total,
                minutes,
            )
            return
        spent, counted = progress.spent_s, progress.counted_s
        self._time = TimeLimit(minutes, agree=self._agree, spent_s=spent, counted_s=counted)
        # plan.json may know later looks, at the pace of steps that a kill took back
        total, looks = progress.total_steps, progress.looks
        self._plan = replace(self._plan, total_steps=total, looks=looks)
        log.info("%.1f of %g minutes are spent, %d steps planned", spent / 60, minutes, total)

    def _within_limits(self, fitting: int) -> int:
        known = steps_within_limits(self.train, self._order.steps_per_epoch)
        return fitting if known is None else min(known, fitting)

    def _look_at_pace(self, step: int, display: ProgressDisplay) -> None:
        """Let a time limit allow other steps than its first ones promised."""
        before = self._plan.total_steps
        if self._time is None or not self._time.is_due(step, before):
            return
        total = max(step, self._within_limits(self._time.look(step)))
        if abs(total - before) <= _KEPT_CHANGE * (before - step):
            return
        self._plan = self._plan.look(step, total)
        if self.accelerator.is_main_process:
            self._plan.write(self._folder.root)
        display.set_total(total)
        log.info(
            "at the pace by step %d, %g minutes allow %d optimizer steps; planned were %d",
            step,
            self.train.max_minutes,
            total,
            before,
        )

    def _rehearse(self, step: int) -> float:
        """Do a step at learning rate zero and forget its moments: only time passes."""
        start = time.perf_counter()
        self._step(step, 0.0, None)
        seconds = time.perf_counter() - start
        for optimizer in self._optimizers:
            optimizer.state.clear()
        return seconds

    def _agree(self, number: float) -> float:
        if self.accelerator.num_processes == 1:
            return number
        shared = torch.tensor([number], dtype=torch.float64, device=self.accelerator.device)
        distributed.broadcast(shared, src=0)
        return float(shared)

    def _saves_at(self, step: int) -> bool:
        return (
            step == self._plan.total_steps
            or step % self.train.save_every_steps == 0
            or self._probes_at(step)
        )

    def _probes_at(self, step: int) -> bool:
        every = self.train.probe_every_steps or self.train.save_every_steps
        return step == self._plan.total_steps or step % every == 0

    def _checkpoint(self, step: int) -> None:
        """Probe and write; all processes come here, since shards are put together by all."""
        is_main = self.accelerator.is_main_process
        with nullcontext() if self._average is None else self._average.in_place():
            whole = gather_weights(self.drafter, is_kept=is_main)
        is_best = bool(self.target.run_on_first(lambda: self._probe(step, whole), is_first=is_main))
        tensors = self._state().tensors()  # after the probe, which may count into buffers
        if is_main:
            self._write(step, whole, tensors, is_best=is_best)
        self.accelerator.wait_for_everyone()
        # only the first process probes; all must end together
        self._idle_probes = int(self._agree(float(self._idle_probes)))

    def _served(self, whole: dict[str, nn.Parameter]) -> AbstractContextManager[None]:
        """Put the weights that are saved and probed into the drafter for a while."""
        if self._is_sharded:
            return weights_in_place(self.drafter, whole)
        return nullcontext() if self._average is None else self._average.in_place()

    def _probe(self, step: int, whole: dict[str, nn.Parameter]) -> bool:
        """Let the caller measure the drafter; True when it is the best so far."""
        if self._on_checkpoint is None or not self._probes_at(step):
            return False
        self.drafter.eval()
        with self._served(whole), merged(self.drafter):
            numbers = self._on_checkpoint(step, self.drafter)
        self.drafter.train()
        if not numbers:
            return False
        self._log(step, "validation", {f"accept/{name}": x for name, x in numbers.items()})
        score = numbers.get(self.train.best_by)
        if score is None:
            return False
        is_better = self._best is None or score > self._best.score
        self._idle_probes = 0 if is_better else self._idle_probes + 1
        if self._best is not None and score < self._best.score:
            return False
        # of equals the last: it has learned more, and few prompts tell little
        self._best = _Best(step, float(score), numbers.get("tau"))
        return True

    def _write(
        self,
        step: int,
        whole: dict[str, nn.Parameter],
        tensors: dict[str, Tensor],
        *,
        is_best: bool,
    ) -> None:
        epoch, position = divmod(step, self._order.steps_per_epoch)
        best, limit = self._best, self._time
        progress = Progress(
            step=step,
            epoch=epoch,
            position=position,
            total_steps=self._plan.total_steps,
            best_step=None if best is None else best.step,
            best_tau=None if best is None else best.tau,
            best_by=self.train.best_by,
            best_score=None if best is None else best.score,
            idle_probes=self._idle_probes,
            spent_s=None if limit is None else limit.spent_s,
            counted_s=() if limit is None else tuple(limit.counted_s),
            looks=self._plan.looks,
        )

        def write(folder: Path) -> None:
            extra = self._origin | {"step": step, "total_steps": self._plan.total_steps}
            with self._served(whole):
                save_drafter(self.drafter, folder, extra=extra)
            write_state(folder, progress, tensors)

        self._folder.commit(step, write, is_best=is_best)
        self._folder.rotate(self.train.keep_checkpoints)

    def _restore(self, folder: Path) -> int:
        """Put a checkpoint's state back; return the optimizer steps done."""
        progress, tensors = read_state(folder)
        self._state().put(tensors, folder)
        # scores of another kind do not compare: the next probe is then the best so far
        is_comparable = progress.best_by in (None, self.train.best_by)
        score = progress.best_tau if progress.best_by is None else progress.best_score
        if is_comparable and progress.best_step is not None and score is not None:
            self._best = _Best(progress.best_step, score, progress.best_tau)
            self._idle_probes = progress.idle_probes
            if self.accelerator.is_main_process:
                # the process may have died between the checkpoint and its name
                self._folder.name_best(progress.best_step)
        log.info("resumed from %s at step %d", folder, progress.step)
        return progress.step

    def _state(self) -> TrainingState:
        means = {} if self._average is None else self._average.means
        return TrainingState(self.drafter, self._parameters, self._optimizers, means)

    def _log(self, step: int, split: str, numbers: dict[str, float]) -> None:
        if self._metrics is not None and self.accelerator.is_main_process:
            self._metrics(step, split, **numbers)

    def _result(self) -> TrainingResult:
        latest = self._folder.latest()
        assert latest is not None  # the last step is always saved
        best = self._folder.best()
        return TrainingResult(
            total_steps=self._done,
            latest=latest,
            best=latest if best is None else best,
            best_tau=None if self._best is None else self._best.tau,
        )


def _keep_float32(drafter: Drafter) -> None:
    """Hold trainable weights in float32: small updates vanish in bfloat16."""
    for parameter in drafter.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
