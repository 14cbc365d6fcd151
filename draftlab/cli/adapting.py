"""Adapters of a training run: what they stand on, checked early and loaded when it starts."""

from pathlib import Path

from draftlab.cli.drafter_size import build_empty_drafter
from draftlab.cli.drafters import find_drafter_folder, starts_useful
from draftlab.cli.schema import RunSettings
from draftlab.drafters.adapters import BaseDrafter, adapt, check_adapter
from draftlab.drafters.base import Drafter
from draftlab.drafters.draft_model import DraftModelSettings
from draftlab.drafters.store import build_drafter, load_adapted, load_drafter, read_card
from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.targets.fingerprint import fingerprint_weights
from draftlab.targets.outline import Outline
from draftlab.targets.target import Target
from draftlab.training.optim import check_adapter_optimizer


def require_base(settings: RunSettings) -> None:
    """Refuse adapters on nothing, or settings that would have no effect on them; loads nothing.

    Raises:
        ConfigError: with what to pass.
    """
    if settings.adapter.kind == "none":
        return
    init = settings.init
    if init is None and not starts_useful(settings.drafter):
        raise ConfigError(
            f"adapter=lora adapts a drafter you have, and drafter={settings.drafter.kind} without "
            "init would start untrained; pass init=DRAFTER (a run, a drafter's folder or a hub "
            "id), or adapter=none to train a new one"
        )
    check_adapter_optimizer(settings.optim)
    if init is not None and Path(init).exists():
        _refuse_other_shape(find_drafter_folder(init), settings)


def require_rank(settings: RunSettings, outline: Outline | None) -> None:
    """Refuse a rank that no matrix of the drafter has room for, as far as sizes are known by now.

    A draft model's are not before it is loaded: `adapt` looks again.

    Args:
        settings: everything the run is.
        outline: the target without its weights; None: unknown.

    Raises:
        ConfigError: with what to pass.
    """
    rank, drafter = settings.adapter.rank, settings.drafter
    if rank is None or outline is None or isinstance(drafter, DraftModelSettings):
        return
    empty = build_empty_drafter(drafter, outline)
    if empty is not None:
        check_adapter(empty, rank)


def make_adapted(run: RunDir, settings: RunSettings, target: Target) -> Drafter:
    """Load the drafter that is adapted, with new adapters, or with those whose training goes on.

    A run that goes on finds its base by what its own checkpoint says: the best checkpoint of `init`
    may be another one by now.

    Raises:
        CheckpointError: the base of the adapters is gone.
        ConfigError: `init` is an adapter of another rank or alpha.
    """
    latest = run.pointed("latest")
    if latest is not None:
        return load_adapted(latest, target.drafter_view)
    if settings.init is None:
        drafter = build_drafter(settings.drafter, target.drafter_view, seed=settings.seed)
        base = BaseDrafter(None, fingerprint_weights(drafter))
    else:
        folder = find_drafter_folder(settings.init)
        _refuse_other_shape(folder, settings)
        card = read_card(folder)
        if card.adapter is not None:
            return load_adapted(folder, target.drafter_view)
        drafter = load_drafter(folder, target.drafter_view)
        base = BaseDrafter(folder, card.sha256)
    adapt(drafter, settings.adapter, base, seed=settings.seed)
    return drafter


def _refuse_other_shape(folder: Path, settings: RunSettings) -> None:
    saved, asked = read_card(folder).adapter, settings.adapter
    if saved is not None and (saved.rank, saved.alpha) != (asked.rank, asked.alpha):
        raise ConfigError(
            f"init={settings.init} is an adapter of rank {saved.rank} and alpha {saved.alpha:g}, "
            f"but adapter.rank={asked.rank} and adapter.alpha={asked.alpha:g} are asked for; pass "
            f"adapter.rank={saved.rank} adapter.alpha={saved.alpha:g} to train it further, or its "
            "own base as init for a new one"
        )
