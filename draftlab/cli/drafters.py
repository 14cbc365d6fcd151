"""One way to name a drafter everywhere: a kind, a run, a folder, or a hub id."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftlab.drafters.base import Drafter, DrafterSettings
from draftlab.drafters.store import build_drafter, load_drafter
from draftlab.errors import CheckpointError, ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.compose import Composed, compose, near_names
from draftlab.settings.locate import conf_dir
from draftlab.targets.target import Target


def open_drafter(name: str | DrafterSettings, target: Target) -> Drafter:
    """Load or build a drafter, ready to decode with this target.

    Args:
        name: settings of a kind, or the name of one (`ngram`), a run folder (its best checkpoint),
            a checkpoint folder, or a hub id of a published drafter. Adapters come merged into
            their base.
        target: the target it will draft for.

    Raises:
        ConfigError: nothing of that name, or a kind that has to be trained first.
        TargetMismatch: it was made for another target.
    """
    if isinstance(name, DrafterSettings):
        drafter = build_drafter(name, target.drafter_view)
        if any(p.requires_grad for p in drafter.parameters()) and not starts_useful(name):
            raise ConfigError(
                f"drafter={name.kind} is a kind that has to be trained; pass a run or a folder "
                f"(draftlab train drafter={name.kind} makes one)"
            )
    elif name in _kinds():
        drafter = open_drafter(_settings_of_kind(name), target)
    else:
        folder = find_drafter_folder(name).resolve()
        drafter = load_drafter(folder, target.drafter_view)
        drafter.folder = folder
    return drafter.to(device=target.drafter_view.device, dtype=target.dtype).eval()


def compose_for_drafters(primary: str, words: Sequence[str]) -> Composed:
    """Compose, with the target, its template's variables and the hardware of the first run named.

    Words that choose or change either beat the run. What a run saved is taken as it is: typed anew,
    its nulls would let a preset's values win.

    Raises:
        ConfigError: the words do not compose, or name a drafter that is not there.
    """
    composed = compose(primary, words)
    listed = composed.data.get("drafters")
    names = [*listed] if isinstance(listed, list) else [composed.data["drafter"]]
    trained = [name for name in names if isinstance(name, str) and name not in _kinds()]
    for name in trained:
        if not may_be_hub_id(name):
            find_drafter_folder(name)
    runs = [run for name in trained if (run := find_owning_run(name)) is not None]
    if runs:
        saved = runs[0].read_config()
        _take_over(composed, words, "target", saved.get("target"))
        _take_over(composed, words, "hardware", _alone(saved.get("hardware")))
        _ask_as(composed, words, saved.get("data", {}).get("template_options"))
    return composed


def find_owning_run(name: str) -> RunDir | None:
    """Find the run that a drafter's name means: the run's folder, or one of its checkpoints."""
    path = Path(name).expanduser().absolute()
    run = RunDir(path.parent.parent if path.parent.name == "checkpoints" else path)
    return run if run.config_path.is_file() else None


def drafter_label(name: str | DrafterSettings) -> str:
    """Give a short name for tables: the kind, or what the folder's drafter is."""
    if isinstance(name, DrafterSettings):
        return name.kind
    return name if name in _kinds() else Path(name).name or name


def find_drafter_folder(name: str) -> Path:
    """Find the folder with drafter.json that a name means: a run's best one, or the folder itself.

    Raises:
        ConfigError: nothing there.
        CheckpointError: a run without a checkpoint.
    """
    path = Path(name).expanduser()
    if (path / "drafter.json").is_file():
        return path
    if (path / "config.yaml").is_file():
        run = RunDir(path)
        found = run.pointed("best") or run.pointed("latest")
        if found is None and run.is_finished:
            raise CheckpointError(
                f"run {path} is finished and its checkpoints are gone; train it anew with the "
                f"command in {run.provenance_path}, or name another run"
            )
        if found is None:
            raise CheckpointError(
                f"run {path} has no checkpoint yet; go on with draftlab train "
                + shlex.quote(f"resume={path}")
            )
        return found
    if path.exists():
        raise ConfigError(_explain_no_drafter(path))
    if may_be_hub_id(name):
        return _download(name)
    if name in _kinds():
        raise ConfigError(
            f"{name} is a kind of drafter and has no trained weights to start from; expected a run "
            "or drafter folder, or a hub id OWNER/NAME"
        )
    raise ConfigError(
        f"no drafter {name!r}: expected one of {', '.join(_kinds())}, a run or drafter folder, or "
        f"a hub id OWNER/NAME; near: {', '.join(near_names(name, _kinds()))}"
    )


def _explain_no_drafter(path: Path) -> str:
    from draftlab.export.base import describe_origin

    origin = describe_origin(path)
    if origin is None:
        return f"{path} holds no drafter: expected drafter.json, or a run folder"
    return (
        f"{path} is an export: serving engines read it, draftlab does not; pass {origin} that it "
        "was made of"
    )


def may_be_hub_id(name: str) -> bool:
    """Tell whether a drafter's name has the shape OWNER/NAME and is no path here."""
    is_path = name.startswith((".", "~", "/")) or Path(name).exists()
    return name.count("/") == 1 and not is_path


def _take_over(composed: Composed, words: Sequence[str], group: str, saved: Any) -> None:
    if saved is None or any(word.startswith((f"{group}=", "recipe=")) for word in words):
        return
    keys = [word.partition("=")[0].partition(".") for word in words]
    typed = {key for name, dot, key in keys if name == group and dot}
    composed.data[group] = {**saved, **{key: composed.data[group][key] for key in typed}}


def _ask_as(composed: Composed, words: Sequence[str], options: Any) -> None:
    """Ask the target as it was asked when the drafter learned: thinking or not are two laws."""
    if options and not any(
        word.startswith(("target=", "data=", "recipe=", "data.template_options")) for word in words
    ):
        composed.data["data"]["template_options"] = options


def _alone(hardware: Any) -> Any:
    """Give one process what a run gave several."""
    if hardware is None or hardware["num_processes"] == 1:
        return hardware
    kind = "cpu" if hardware["kind"] == "cpu" else "single_gpu"
    alone = {"num_processes": 1, "threads": None, "shard": "none", "accelerate_config": None}
    return {**hardware, "kind": kind, **alone}


# an adapter is published with its base in a folder of its own
_PUBLISHED = ["drafter.*", "adapter.*", "base/drafter.*", "README.md"]


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=_PUBLISHED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"no folder {name!r} here, and the hub did not give a drafter of that id: {error}"
        ) from None
    if not (folder / "drafter.json").is_file():
        raise ConfigError(f"hub repository {name} holds no drafter.json: not a draftlab drafter")
    return folder


def _kinds() -> list[str]:
    return sorted(path.stem for path in (conf_dir() / "drafter").glob("*.yaml"))


def _settings_of_kind(name: str) -> DrafterSettings:
    from draftlab.cli.schema import parse_drafter

    return parse_drafter(compose("train", [f"drafter={name}"]).data["drafter"])


def starts_useful(settings: DrafterSettings) -> bool:
    """Tell whether a drafter is of use untrained: a draft model from a folder or hub is."""
    return bool(getattr(settings, "model", None))
