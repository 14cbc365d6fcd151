"""The folder of a trained drafter that another is compared with while it trains. Read it all."""

from pathlib import Path

from draftlab.drafters.base import Drafter
from draftlab.drafters.store import CARD, load_drafter
from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.targets.view import TargetView


def load_reference(name: str, target: TargetView, *, kind: str) -> Drafter:
    """Load a trained drafter from its folder, or a run's best one; it is frozen.

    Args:
        name: folder of a drafter or of a run.
        target: the target of both drafters.
        kind: what it must be.

    Raises:
        ConfigError: nothing there, or a drafter of another kind.
        CheckpointError: incomplete or damaged.
        TargetMismatch: it was made for another target.
    """
    folder = Path(name).expanduser()
    if (folder / "config.yaml").is_file():
        run = RunDir(folder)
        folder = run.pointed("best") or run.pointed("latest") or folder
    if not (folder / CARD).is_file():
        raise ConfigError(
            f"reference={name}: {folder} holds no {CARD}; expected the folder of a trained {kind}, "
            "a run folder, or start"
        )
    drafter = load_drafter(folder, target)
    if drafter.kind != kind:
        raise ConfigError(
            f"reference={name} is a drafter of kind {drafter.kind}; expected a {kind} of the same "
            "sizes as the one to train"
        )
    return drafter.requires_grad_(False).eval()
