"""Mirrors of metrics.jsonl for those who watch runs in wandb or TensorBoard.

Keys come from the environment alone (wandb reads WANDB_API_KEY itself) and are never looked at.
"""

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.base import Settings


class TrackerSettings(Settings):
    """Keys of conf/tracker/*.yaml.

    Attributes:
        kind: where numbers are mirrored.
        project: wandb's project.
        mode: wandb's mode; offline keeps everything in the run folder until `wandb sync`.
    """

    kind: Literal["none", "wandb", "tensorboard"]
    project: str
    mode: Literal["offline", "online"]


class Tracker(ABC):
    """Where numbers are mirrored to."""

    @abstractmethod
    def log(self, step: int, split: str, numbers: Mapping[str, int | float]) -> None:
        """Mirror one line of metrics.jsonl."""

    @abstractmethod
    def close(self) -> None:
        """Hand over what is left."""


def require_tracker(settings: TrackerSettings) -> None:
    """Refuse a tracker whose package is missing; imports nothing.

    Raises:
        ConfigError: with the command that installs it.
    """
    if settings.kind != "none" and importlib.util.find_spec(settings.kind) is None:
        raise ConfigError(
            f"tracker={settings.kind} needs the package {settings.kind}, which is not installed; "
            "run: pip install 'draftlab[trackers]'"
        )


def open_tracker(settings: TrackerSettings, run: RunDir, config: Mapping[str, Any]) -> Tracker:
    """Open the mirror that the settings name. Call it on one rank only.

    Args:
        settings: which, and how.
        run: the run; offline files go into its folder.
        config: resolved settings, shown beside the numbers.

    Raises:
        ConfigError: the tracker's package is missing.
    """
    require_tracker(settings)
    if settings.kind == "wandb":
        return _Wandb(settings, run, config)
    if settings.kind == "tensorboard":
        return _Tensorboard(run)
    return _Nothing()


class _Nothing(Tracker):
    def log(self, step: int, split: str, numbers: Mapping[str, int | float]) -> None:
        pass

    def close(self) -> None:
        pass


class _Wandb(Tracker):
    def __init__(self, settings: TrackerSettings, run: RunDir, config: Mapping[str, Any]) -> None:
        import wandb

        # a git remote or a command line may carry a token: wandb's own record of them stays off
        quiet = wandb.Settings(
            console="off",
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
        )
        self._run = wandb.init(
            project=settings.project,
            name="/".join(run.path.parts[-2:]),
            dir=str(run.path),
            mode=settings.mode,
            config=dict(config),
            settings=quiet,
            reinit="create_new",
        )
        logging.getLogger(__name__).info("wandb %s: %s", settings.mode, run.path / "wandb")

    def log(self, step: int, split: str, numbers: Mapping[str, int | float]) -> None:
        self._run.log({**_named(split, numbers), "step": step})

    def close(self) -> None:
        self._run.finish()


class _Tensorboard(Tracker):
    def __init__(self, run: RunDir) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(run.path / "tensorboard"))

    def log(self, step: int, split: str, numbers: Mapping[str, int | float]) -> None:
        for name, value in _named(split, numbers).items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        self._writer.close()


def _named(split: str, numbers: Mapping[str, int | float]) -> dict[str, int | float]:
    return {
        key if key.startswith(f"{split}/") else f"{split}/{key}": v for key, v in numbers.items()
    }
