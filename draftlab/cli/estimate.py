"""What a run will take, as far as it is known before anything is loaded: sizes, tokens, disk.

Read estimate_run; memory_forecast.py and time_forecast.py go on from here.
"""

import json
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from draftlab.cli.disk import describe_bytes, free_bytes, require_writable
from draftlab.cli.drafter_size import DrafterSize, find_drafter_size, with_adapters
from draftlab.cli.feature_size import bytes_of_token
from draftlab.cli.schema import RunSettings
from draftlab.cli.text_tokenizer import find_tokenizer
from draftlab.data.conversations import BadLine
from draftlab.data.loader import read_training_chats
from draftlab.data.unasked import count_unasked
from draftlab.errors import ConfigError
from draftlab.targets.features import FeatureRequest
from draftlab.targets.outline import Outline, find_outline
from draftlab.targets.settings import TargetSettings

# where nobody can tell before the target is here: three taps and the final hidden state
_USUAL_NEEDS = FeatureRequest((1, 2, 3), wants_final=True)
_PROMPT_TOKENS = 100  # of a usual prompt; answers are bounded by max_new_tokens
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """Sizes of a target that a config file tells.

    Attributes:
        hidden_size: D.
        num_parameters: weights, all together.
    """

    hidden_size: int
    num_parameters: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What there is to learn.

    Attributes:
        num_prompts: chats read for training, without those that cannot be asked; of a hub data
            set, as many as are asked for.
        num_answers: answers learned.
        sample_tokens: a usual prompt and an answer of full length, tokens.
        is_answered_here: the target answers the prompts first.
        bad_lines: lines of the data that are skipped on request.
        num_unread: chats read that are rendered text, taken unseen, since the target's tokenizer
            is not here.
        unasked: chats left out, since the target cannot be asked them, by reason.
    """

    num_prompts: int
    num_answers: int
    sample_tokens: int
    is_answered_here: bool
    bad_lines: tuple[BadLine, ...] = ()
    num_unread: int = 0
    unasked: dict[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers, at most."""
        return self.num_answers * self.sample_tokens


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known; None is unknown.

    Attributes:
        workload: what there is to learn.
        outline: the target without its weights.
        drafter: how large the drafter is.
        dtype: of the target's weights, as they will be loaded.
        memory_bytes: the target's weights in memory.
        token_bytes: what the hidden states of one token take on disk, exactly; None also where
            none are kept.
        disk_bytes: about this much, at answers of full length, is written below paths.outputs.
        minutes: bound on the optimizer steps.
    """

    workload: Workload | None
    outline: Outline | None
    drafter: DrafterSize | None
    dtype: str
    memory_bytes: int | None
    token_bytes: int | None
    disk_bytes: int | None
    minutes: float | None

    @property
    def trains_nothing(self) -> bool:
        """True for a target with an encoder, which decodes only, and drafters without weights."""
        has_encoder = self.outline is not None and self.outline.has_encoder
        return has_encoder or (self.drafter is not None and self.drafter.num_trainable == 0)


def estimate_run(settings: RunSettings, *, asks_hub: bool = False) -> Estimate:
    """Estimate a run; reads the data's text and loads nothing but, for rendered text, a tokenizer.

    Args:
        settings: everything the run is.
        asks_hub: fetch the config.json of hub models where the hub answers.

    Raises:
        DataError: a missing file, lines that cannot be read, or nothing to learn.
        ConfigError: a target that is not there.
        UnsupportedTarget: a target that could not be loaded.
    """
    workload = _find_workload(settings)
    outline = find_outline(settings.target, asks_hub=asks_hub)
    sizes = find_target_sizes(settings.target, outline)
    drafter = None
    if outline is not None:
        drafter = find_drafter_size(settings.drafter, outline, settings.target, asks_hub=asks_hub)
        if drafter is not None and settings.adapter.rank is not None:
            drafter = with_adapters(drafter, settings.adapter.rank)
    dtype = find_dtype(settings)
    token, disk = None, None
    if sizes and workload and workload.is_answered_here and settings.regenerate.capture_features:
        needs = drafter.needs if drafter else _USUAL_NEEDS
        written = settings.regenerate.features_dtype
        token = bytes_of_token(needs, sizes.hidden_size, written, dtype)
        disk = token * workload.num_tokens
    return Estimate(
        workload=workload,
        outline=outline,
        drafter=drafter,
        dtype=dtype,
        memory_bytes=sizes.num_parameters * bytes_of_number(dtype) if sizes else None,
        token_bytes=token,
        disk_bytes=disk,
        minutes=settings.train.max_minutes,
    )


def require_disk(estimate: Estimate, outputs: Path) -> None:
    """Refuse a run that the disk cannot hold, or a folder that cannot be written.

    Raises:
        ConfigError: with the bytes needed, the bytes free, and what to change.
    """
    require_writable(outputs)
    free = free_bytes(outputs)
    if estimate.disk_bytes is not None and estimate.disk_bytes > free:
        raise ConfigError(
            f"{outputs} has {describe_bytes(free)} free and this run may write "
            f"{describe_bytes(estimate.disk_bytes)} of the target's features; pass "
            "paths.outputs=FOLDER on another disk, regenerate.features_dtype=fp8 (half of bf16), "
            "regenerate.capture_features=false (training then runs the target again), or "
            "data.max_samples=N"
        )


def require_training(estimate: Estimate, kind: str) -> None:
    """Refuse to train where there is nothing to train.

    Args:
        estimate: of the run.
        kind: of drafter.

    Raises:
        ConfigError: the target has an encoder, or the drafter no weights of its own.
    """
    if not estimate.trains_nothing:
        return
    if estimate.outline is not None and estimate.outline.has_encoder:
        raise ConfigError(
            f"target {estimate.outline.name} has an encoder: draftlab decodes with it and trains "
            "nothing for it; measure it with draftlab eval and the same words"
        )
    if kind == "hybrid":
        raise ConfigError(
            "drafter=hybrid is trained by its head: train that first, by its own kind (draftlab "
            "train drafter=eagle3, for one), then name its run: draftlab eval drafter=hybrid "
            "drafter.head=RUN"
        )
    raise ConfigError(
        f"drafter={kind} has no weights, so there is nothing to train; measure it as it is: "
        f"draftlab eval drafter={kind}"
    )


def find_target_sizes(target: TargetSettings, outline: Outline | None) -> TargetSizes | None:
    """Give a target's sizes; None when only loading it can tell.

    Args:
        target: its settings.
        outline: what `find_outline` found.
    """
    if outline is not None:
        return TargetSizes(outline.hidden_size, outline.num_parameters)
    if target.source == "local" and target.name:
        return _sizes_of_folder(Path(target.name).expanduser())
    return None


def find_dtype(settings: RunSettings) -> str:
    """Tell what the target's weights will be in memory; auto is bfloat16 on any CUDA device."""
    if settings.target.dtype != "auto":
        return settings.target.dtype
    if settings.hardware.kind != "cpu":
        return "bfloat16"
    from draftlab.targets.load import resolve

    return resolve(settings.target.model_copy(update={"device": "cpu"})).dtype


def bytes_of_number(dtype: str) -> int:
    """Give the bytes of one number."""
    return _BYTES.get(dtype, 2)


def _find_workload(settings: RunSettings) -> Workload | None:
    data, answering = settings.data, settings.regenerate
    unasked: dict[str, int] = {}
    if data.kind == "hub":
        if data.max_samples is None:
            return None
        count, bad, unread = round(data.max_samples * (1 - data.validation_fraction)), (), 0
    else:
        tokenizer = cache(partial(find_tokenizer, settings.target))
        reading = read_training_chats(data, settings.paths.cache, tokenizer)
        count, bad = len(reading.conversations), tuple(reading.bad_lines)
        unread = sum(chat.text is not None for chat in reading.conversations)
        if unread and tokenizer() is not None:
            unread = 0
        if data.answers == "target":
            unasked = count_unasked(reading.conversations)
            count -= sum(unasked.values())
    answers, tokens = count, data.max_tokens
    if is_answered_here := data.answers == "target":
        answers = count * answering.answers_per_prompt
        tokens = min(_PROMPT_TOKENS + answering.max_new_tokens, data.max_tokens)
    return Workload(count, answers, tokens, is_answered_here, bad, unread, unasked)


def _sizes_of_folder(folder: Path) -> TargetSizes | None:
    """Read what a config says in the usual words, and count the weights by their files."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    hidden = config.get("hidden_size") or config.get("n_embd")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    width = bytes_of_number(str(config.get("dtype") or config.get("torch_dtype")))
    return TargetSizes(hidden_size=hidden, num_parameters=size // width) if hidden else None
