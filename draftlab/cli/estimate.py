"""What a run will take, as far as it is known before anything is loaded: disk, memory, minutes."""

import json
from dataclasses import dataclass
from pathlib import Path

from draftlab.cli.disk import describe_bytes, free_bytes
from draftlab.cli.schema import RunSettings
from draftlab.data.loader import read_split
from draftlab.errors import ConfigError
from draftlab.targets.features import FeatureRequest
from draftlab.targets.settings import TargetSettings

# where nobody can tell before the target is here: three taps and the final hidden state
_USUAL_NEEDS = FeatureRequest((1, 2, 3), wants_final=True)
_PROMPT_TOKENS = 100  # of a usual prompt; answers are bounded by max_new_tokens
_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8, "auto": 4}


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
class Estimate:
    """What is known; None is unknown.

    Attributes:
        num_prompts: chats read for training.
        memory_bytes: the target's weights in memory.
        token_bytes: what the hidden states of one token take on disk, exactly.
        disk_bytes: about this much, at answers of full length, is written below paths.outputs.
        minutes: bound on the optimizer steps.
    """

    num_prompts: int | None
    memory_bytes: int | None
    token_bytes: int | None
    disk_bytes: int | None
    minutes: float | None


def estimate_run(settings: RunSettings) -> Estimate:
    """Estimate a run; reads the data's text, loads nothing, downloads nothing.

    Raises:
        DataError: a missing file, or lines that cannot be read.
    """
    num_prompts = None
    if settings.data.kind != "hub":
        reading = read_split(settings.data, "train", settings.paths.cache)
        num_prompts = len(reading.conversations)
    sizes = find_target_sizes(settings.target)
    token, disk = None, None
    captures = settings.data.answers == "target" and settings.regenerate.capture_features
    if sizes and num_prompts is not None and captures:
        from draftlab.cli.feature_size import bytes_of_token, foresee_needs

        needs = foresee_needs(settings.drafter, settings.target) or _USUAL_NEEDS
        token = bytes_of_token(needs, sizes.hidden_size, settings)
        answers = num_prompts * settings.regenerate.answers_per_prompt
        disk = token * answers * (settings.regenerate.max_new_tokens + _PROMPT_TOKENS)
    return Estimate(
        num_prompts=num_prompts,
        memory_bytes=sizes.num_parameters * _BYTES[settings.target.dtype] if sizes else None,
        token_bytes=token,
        disk_bytes=disk,
        minutes=settings.train.max_minutes,
    )


def require_disk(estimate: Estimate, outputs: Path) -> None:
    """Refuse a run that the disk cannot hold.

    Raises:
        ConfigError: with the bytes needed, the bytes free, and what to change.
    """
    free = free_bytes(outputs)
    if estimate.disk_bytes is not None and estimate.disk_bytes > free:
        raise ConfigError(
            f"{outputs} has {describe_bytes(free)} free and this run may write "
            f"{describe_bytes(estimate.disk_bytes)} of the target's features; pass "
            "paths.outputs=FOLDER on another disk, regenerate.features_dtype=fp8 (half of bf16), "
            "regenerate.capture_features=false (training then runs the target again), or "
            "data.max_samples=N"
        )


def find_target_sizes(target: TargetSettings) -> TargetSizes | None:
    """Read a target's sizes from what lies on this machine; None when it would be downloaded."""
    if target.source == "demo":
        return TargetSizes(hidden_size=576, num_parameters=134_515_008)
    if target.source == "tiny":
        return TargetSizes(hidden_size=64, num_parameters=500_000)
    if target.source == "local" and target.name:
        return _sizes_of_folder(Path(target.name).expanduser())
    return None


def _sizes_of_folder(folder: Path) -> TargetSizes | None:
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"target.name={folder} has no config.json; give a folder that transformers "
            "can load, or target=hub target.name=OWNER/NAME"
        )
    config = json.loads(path.read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    hidden = config.get("hidden_size") or config.get("n_embd")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    width = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    return TargetSizes(hidden_size=hidden, num_parameters=size // width) if hidden else None
