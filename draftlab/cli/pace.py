"""What a run would do in a second here, measured on a little of its own work: `check probe=true`.

The target answers one batch of the run's own prompts, shortly; the drafter takes a few optimizer
steps on these answers, without effect. All that is written goes into a folder that is deleted.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from draftlab.cli.collect import Collected, collect_samples, encode_prompts
from draftlab.cli.hardware import apply_hardware, place_drafters
from draftlab.cli.schema import RunSettings
from draftlab.cli.train_job import find_needs, make_drafter
from draftlab.data.learning import mark_learned
from draftlab.data.packing import cut_samples, pack
from draftlab.data.prompts import load_prompts
from draftlab.decoding.decoder import Decoder
from draftlab.errors import ConfigError
from draftlab.evaluation.memory import PeakMemory
from draftlab.runs.run_dir import RunDir
from draftlab.targets.load import load_target, resolve
from draftlab.targets.target import Target
from draftlab.training.rows import TrainingRows
from draftlab.training.trainer import Trainer

_WARM_UP_TOKENS = 4
_ANSWERING_S = 10.0
_MOST_CHATS = 64  # where answers are given: enough for a batch
_PLAIN_TOKENS = 32
_STEPS = 3


@dataclass(frozen=True, slots=True)
class Pace:
    """Rates of one process, tokens a second; None where the run does no such thing.

    Attributes:
        seconds: what measuring took, loading included.
        answering: the target answers, prompts read and hidden states kept.
        training: tokens through optimizer steps, without probes and checkpoints.
        plain: plain decoding at batch 1.
        memory_bytes: the most that was in use; None where the system does not tell.
    """

    seconds: float
    answering: float | None
    training: float
    plain: float | None
    memory_bytes: int | None


def measure_pace(settings: RunSettings) -> Pace:
    """Load the target and do a little of everything a run does.

    Args:
        settings: of the run; its limits on steps, passes and minutes do not matter.

    Raises:
        ConfigError: a target that is cut over processes.
        DraftlabError: whatever would stop the run itself.
    """
    if settings.hardware.cuts_target:
        raise ConfigError(
            f"probe=true times one process, and hardware.shard={settings.hardware.shard} cuts the "
            "target over several; pass probe=false, or hardware.shard=none"
        )
    began = time.monotonic()
    apply_hardware(settings.hardware, places_drafters=True)
    target = load_target(resolve(settings.target))
    place_drafters(target, settings.hardware)
    peak = PeakMemory(target.device)
    peak.restart()
    with TemporaryDirectory(prefix="draftlab-check-") as folder, _quiet():
        collected, answering = _collect(settings, target, Path(folder))
        training = _train(settings, target, collected, RunDir(Path(folder) / "run"))
    return Pace(
        seconds=time.monotonic() - began,
        answering=answering,
        training=training,
        plain=_decode(settings, target),
        memory_bytes=peak.read(),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to oneself what the run itself will say."""
    logger = logging.getLogger("draftlab")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _collect(settings: RunSettings, target: Target, folder: Path) -> tuple[Collected, float | None]:
    """Collect a few samples as the run will; tokens a second where the target answers."""
    is_given = settings.data.answers == "given"
    most = _MOST_CHATS if is_given else settings.regenerate.batch_size
    asked = settings.data.max_samples
    data = settings.data.model_copy(
        update={"max_samples": most if asked is None else min(asked, most)}
    )
    needs = find_needs(settings, target)

    def collect(max_new_tokens: int, outputs: Path = folder) -> Collected:
        update = {"max_new_tokens": max_new_tokens, "answers_per_prompt": 1}
        return collect_samples(
            target,
            data,
            settings.regenerate.model_copy(update=update),
            settings.paths.model_copy(update={"outputs": outputs}),
            needs=needs,
            seed=settings.seed,
        )

    limit = settings.regenerate.max_new_tokens
    if is_given:
        return collect(limit), None
    start = time.monotonic()
    few = min(_WARM_UP_TOKENS, limit)
    # first calls allocate and are slow; apart, or equally short answers would be there already
    collect(few, folder / "warm-up")
    per_token = (time.monotonic() - start) / few
    tokens = min(limit, max(2 * _WARM_UP_TOKENS, round(_ANSWERING_S / per_token)))
    start = time.monotonic()
    collected = collect(tokens)
    return collected, collected.facts["num_answer_tokens"] / (time.monotonic() - start)


def _train(settings: RunSettings, target: Target, collected: Collected, run: RunDir) -> float:
    """Take steps without effect on the samples, repeated until they fill a batch."""
    drafter = make_drafter(run, settings, target, collected)
    train = settings.train
    samples = cut_samples(
        mark_learned(collected.samples, settings.data.learn), train.row_tokens
    ).samples
    wanted = train.batch_rows * train.accumulation * train.row_tokens
    rounds = math.ceil(wanted / max(1, sum(len(sample) for sample in samples)))
    trainer = Trainer(
        drafter,
        target,
        TrainingRows(pack(samples * rounds, train.row_tokens), captured=collected.captured),
        optim=settings.optim,
        train=train.model_copy(update={"patience": None}),
        seed=settings.seed,
        folder=run.checkpoints_path,
    )
    return trainer.rehearse(_STEPS)


def _decode(settings: RunSettings, target: Target) -> float | None:
    """Decode plainly what comes with the package: the run's own prompts may be very long."""
    if target.speculation_refusal is not None:
        return None
    (prompt, *_), *_ = encode_prompts(target, load_prompts("train")[:1]).values()
    decoder = Decoder(target, None, settings.decode)
    decoder.generate([prompt], max_new_tokens=_WARM_UP_TOKENS)
    start = time.monotonic()
    (answer,) = decoder.generate([prompt], max_new_tokens=_PLAIN_TOKENS)
    return len(answer.output_ids) / (time.monotonic() - start)
