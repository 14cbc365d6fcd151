"""A small training that the tests of this room share: toy drafter, tiny target, own rows."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from draftlab.data.batch import TokenBatch
from draftlab.data.packing import Sample, pack
from draftlab.drafters.base import DraftBudget, Drafter, DrafterSettings, DraftLoss, Observation
from draftlab.drafters.tree import DraftTree
from draftlab.randomness import Noise, uniforms
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.target import Target
from draftlab.targets.tiny import tiny_target
from draftlab.targets.view import TargetView
from draftlab.training.rows import TrainingRows
from draftlab.training.settings import OptimSettings, TrainSettings
from draftlab.training.trainer import Trainer, TrainingResult

ROW_TOKENS = 64
DEPTHS = 2


class ToySettings(DrafterSettings):
    noise: float


class ToyHeads(Drafter, kind="toy_heads", settings=ToySettings):
    """Two linear heads on a shared layer; enough to move, with noise to be keyed."""

    def __init__(self, settings: ToySettings, target: TargetView) -> None:
        super().__init__()
        self.settings = settings
        self.target = target
        size, vocab = target.spec.hidden_size, target.spec.vocab_size
        self.norm = nn.LayerNorm(size, dtype=target.dtype)
        self.hidden = nn.Linear(size, size, dtype=target.dtype)
        self.heads = nn.ModuleList(
            nn.Linear(size, vocab, bias=False, dtype=target.dtype) for _ in range(DEPTHS)
        )
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                draws = uniforms(5, number, torch.arange(p.numel()))
                p.copy_((draws.reshape(p.shape) - 0.5) * 0.2)

    @property
    def needs(self) -> FeatureRequest:
        return FeatureRequest((), wants_final=True)

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        assert features.final is not None
        assert batch.loss_mask.any(), "batches with nothing to learn never come here"
        x = features.final.to(self.hidden.weight.dtype)
        draws = noise.uniform(batch.sample_ids, x.shape[-1], "toy").to(x.dtype)
        x = torch.tanh(self.hidden(self.norm(x + self.settings.noise * (draws - 0.5))))
        per_token = torch.zeros(batch.input_ids.shape, dtype=x.dtype)
        counted = torch.zeros_like(per_token)
        sums: list[list[Tensor]] = [[], [], [], []]
        for k, head in enumerate(self.heads, start=1):
            mask, ids = batch.shifted_mask(k), batch.shifted_ids(k)
            logits = head(x)
            losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none") * mask
            per_token = per_token + losses
            counted = counted + mask
            hits = (logits.argmax(-1) == ids) & mask
            for column, value in zip(sums, (losses, hits, hits, mask), strict=True):
                column.append(value.sum().detach().float())
        total = x.new_zeros(())
        for sample in torch.unique(batch.sample_ids[batch.sample_ids >= 0]):
            where = batch.sample_ids == sample
            if counted[where].sum() > 0:
                total = total + per_token[where].sum() / counted[where].sum()
        weight = None
        if self.averages_tokens:
            total, weight = per_token.sum(), counted.sum()
        return DraftLoss(
            total.float() if x.dtype != torch.float64 else total, *map(torch.stack, sums), weight
        )

    def open(self, slots: int, capacity: int, kv: KVBuffers) -> Any:
        raise NotImplementedError

    def observe(self, state: Any, seen: Observation) -> None:
        raise NotImplementedError

    def propose(self, state: Any, budget: DraftBudget, uniforms: Float[Tensor, "R N"]) -> DraftTree:
        raise NotImplementedError

    def close(self, state: Any, rows: Int[Tensor, " R"]) -> None:
        raise NotImplementedError


def make_samples(target: Target, answers: list[int], first_id: int = 0) -> list[Sample]:
    """Samples of 60 tokens or fewer, each with an answer of the given length at its end."""
    samples = []
    for number, answer in enumerate(answers, start=first_id):
        length = 20 + answer
        ids = (uniforms(7, number, torch.arange(length)) * target.spec.num_token_ids).long()
        mask = torch.arange(length) >= length - answer
        samples.append(Sample(number, "toy", ids, mask))
    return samples


def make_rows(target: Target, answers: list[int]) -> TrainingRows:
    """One sample a row (two do not fit), so that the number of rows is the number of answers."""
    samples = make_samples(target, [max(answer, 14) if answer else 0 for answer in answers])
    samples = [
        Sample(s.sample_id, s.domain, s.ids, s.mask & (torch.arange(len(s)) >= len(s) - answer))
        for s, answer in zip(samples, answers, strict=True)
    ]
    rows = [row for sample in samples for row in pack([sample], ROW_TOKENS)]
    return TrainingRows(rows, captured=None)


def optim_settings(**changes: Any) -> OptimSettings:
    plain = {
        "kind": "adamw",
        "lr": 0.01,
        "adamw_lr": None,
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "clip_norm": 1.0,
        "warmup_fraction": 0.25,
        "schedule": "cosine",
        "wsd_decay_fraction": 0.2,
        "min_lr_fraction": 0.1,
        "ema_decay": None,
    }
    return OptimSettings(**(plain | changes))


def train_settings(**changes: Any) -> TrainSettings:
    plain = {
        "max_steps": 4,
        "max_epochs": None,
        "max_minutes": None,
        "batch_rows": 2,
        "accumulation": 1,
        "row_tokens": ROW_TOKENS,
        "precision": "no",
        "gradient_checkpointing": False,
        "save_every_steps": 100,
        "keep_checkpoints": 2,
        "log_every_steps": 1,
        "probe_every_steps": None,
        "best_by": "tau",
        "patience": None,
    }
    return TrainSettings(**(plain | changes))


class Recorder:
    """Keeps every line of numbers."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str, dict[str, float]]] = []

    def __call__(self, step: int, split: str, **numbers: float) -> None:
        self.lines.append((step, split, numbers))

    def column(self, key: str) -> dict[int, float]:
        return {step: numbers[key] for step, _, numbers in self.lines if key in numbers}


def toy_drafter(target: Target, noise: float = 0.1, *, averages_tokens: bool = False) -> ToyHeads:
    settings = ToySettings(kind="toy_heads", num_draft_tokens=DEPTHS, noise=noise)
    drafter = ToyHeads(settings, target.view)
    drafter.averages_tokens = averages_tokens
    return drafter


def run_training(
    folder: Path,
    *,
    answers: list[int],
    target: Target | None = None,
    optim: OptimSettings | None = None,
    train: TrainSettings | None = None,
    **options: Any,
) -> tuple[TrainingResult, ToyHeads, Recorder]:
    """Train the toy heads and hand back what came out."""
    target = target or tiny_target()
    drafter = options.pop("drafter", None) or toy_drafter(target)
    recorder = options.pop("metrics", None) or Recorder()
    trainer = Trainer(
        drafter,
        target,
        options.pop("rows", None) or make_rows(target, answers),
        optim=optim or optim_settings(),
        train=train or train_settings(),
        seed=options.pop("seed", 3),
        folder=folder,
        metrics=recorder,
        **options,
    )
    return trainer.run(), drafter, recorder
