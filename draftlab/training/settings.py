"""Keys of conf/optim/*.yaml and conf/train/*.yaml."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from draftlab.settings.base import Settings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimSettings(Settings):
    """How weights move: keys of conf/optim/*.yaml.

    Attributes:
        kind: muon orthogonalises the update of every hidden matrix; adamw treats all alike.
        lr: peak learning rate; under muon, of the hidden matrices.
        adamw_lr: under muon, peak learning rate of all else; None under adamw.
        weight_decay: decoupled, on matrices only (never on norms, biases and embeddings).
        betas: AdamW's decay of the first and second moment.
        clip_norm: the full gradient's norm is cut to this; None leaves it alone.
        warmup_fraction: share of the steps that rises linearly to the peak.
        schedule: shape after the warm-up (schedule.py).
        wsd_decay_fraction: share of the steps that falls at the end; used by wsd only.
        min_lr_fraction: learning rate of the last step, as a share of the peak.
        ema_decay: decay of the running mean of the weights that is saved and probed in their
            place, reached after a warm-up (averaging.py); None saves the weights themselves.
    """

    kind: Literal["muon", "adamw"]
    lr: NonNegativeFloat
    adamw_lr: NonNegativeFloat | None
    weight_decay: NonNegativeFloat
    betas: tuple[Decay, Decay]
    clip_norm: PositiveFloat | None
    warmup_fraction: Fraction
    schedule: Literal["linear", "cosine", "wsd", "constant"]
    wsd_decay_fraction: Fraction
    min_lr_fraction: Fraction
    ema_decay: Decay | None

    @model_validator(mode="after")
    def _check(self) -> "OptimSettings":
        if self.kind == "muon" and self.adamw_lr is None:
            raise ValueError(
                "optim.adamw_lr=None, but muon leaves norms, biases, embeddings and heads to "
                "AdamW; pass optim.adamw_lr=NUMBER (a tenth of optim.lr is usual)"
            )
        if self.kind == "adamw" and self.adamw_lr is not None:
            raise ValueError(
                f"optim.adamw_lr={self.adamw_lr} has no effect with optim.kind=adamw; set optim.lr "
                "and pass optim.adamw_lr=null"
            )
        if self.schedule == "wsd" and self.warmup_fraction + self.wsd_decay_fraction > 1:
            raise ValueError(
                f"optim.warmup_fraction={self.warmup_fraction} and optim.wsd_decay_fraction="
                f"{self.wsd_decay_fraction} add up to more than 1; lower one of them"
            )
        return self


class TrainSettings(Settings):
    """How long and in what portions: keys of conf/train/*.yaml.

    The first limit reached ends the training; at least one is needed. Rows of one optimizer step:
    batch_rows x accumulation x processes.

    Attributes:
        max_steps: optimizer steps.
        max_epochs: passes over the rows.
        max_minutes: time for the optimizer steps, over all resumes; turned into a number of steps
            at the start and when the pace changes (time_limit.py). Probes and checkpoints come on
            top.
        batch_rows: packed rows a process runs at once.
        accumulation: such batches added up before a step.
        row_tokens: length of a packed row, tokens; 2 or more.
        precision: bf16 computes in bfloat16 where that is safe (autocast); weights stay float32.
        gradient_checkpointing: compute the activations of layers once more in the backward pass
            instead of keeping them: less memory, more time, the same numbers.
        save_every_steps: optimizer steps between checkpoints; the last step is always saved.
        keep_checkpoints: newest checkpoints kept; the best one is kept besides.
        log_every_steps: optimizer steps between lines of numbers.
        probe_every_steps: optimizer steps between probes, each with a checkpoint; None probes at
            every checkpoint.
        best_by: what makes a probe the best: tau, tokens a verify step, or tokens_per_s, which also
            weighs what drafting and verifying cost on this machine. Never the loss; of equal
            probes the last.
        patience: probes in a row that may bring nothing better before training ends early; None
            trains to the end.
    """

    max_steps: PositiveInt | None
    max_epochs: PositiveFloat | None
    max_minutes: PositiveFloat | None
    batch_rows: PositiveInt
    accumulation: PositiveInt
    row_tokens: int = Field(ge=2)
    precision: Literal["no", "bf16"]
    gradient_checkpointing: bool
    save_every_steps: PositiveInt
    keep_checkpoints: PositiveInt
    log_every_steps: PositiveInt
    probe_every_steps: PositiveInt | None
    best_by: Literal["tau", "tokens_per_s"]
    patience: PositiveInt | None

    @model_validator(mode="after")
    def _check(self) -> "TrainSettings":
        if self.max_steps is None and self.max_epochs is None and self.max_minutes is None:
            raise ValueError(
                "train.max_steps, train.max_epochs and train.max_minutes are all null, so training "
                "would never end; set one of them"
            )
        return self
