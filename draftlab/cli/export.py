"""`draftlab export`: a trained drafter in a serving engine's format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftlab.cli.disk import require_writable
from draftlab.cli.words import split_words
from draftlab.errors import ConfigError
from draftlab.runs.run_dir import RunDir
from draftlab.settings.compose import compose, expand_home

HELP = """
usage: draftlab export drafter=RUN_OR_FOLDER [export=vllm|hf] [out=FOLDER] [key=value ...]

Writes a folder that a serving engine loads, with a model card and checksums, reads it back and
checks it, and prints the command that serves it. Nothing appears in FOLDER unless all of it is
right.

  drafter=      a run (its best checkpoint) or a drafter's folder
  export=       vllm: eagle, eagle3, peagle, medusa, mtp, dflash and dspark heads; hf: draft
                models, for transformers and vLLM
  out=          where; RUN/export/FORMAT when left out
  target=       the run's own when left out
  export.num_draft_tokens=K  export.target_name_or_path=NAME  export.license=ID
  export.overwrite=true      replace an earlier export

examples:
  draftlab export drafter=outputs/smoke/tiny/20260101-120000-abcd
  draftlab export drafter=RUN export=hf out=~/drafters/mine export.license=apache-2.0
"""


def run(args: list[str]) -> int:
    """Export one drafter and say how to serve it."""
    _, words = split_words(args, most=0)
    outs = [word.partition("=")[2] for word in words if word.startswith("out=")]
    words = [word for word in words if not word.startswith("out=")]
    compose("export", words)  # a misspelt word is told before torch is loaded
    result = _export(words, outs[-1] if outs else None)
    print(f"{result.folder}  ({result.architecture}, {result.num_bytes / 1e6:.1f} MB)")
    print(f"serve it: {result.serve_command}")
    return 0


def _export(words: Sequence[str], out: str | None) -> Any:
    from draftlab.cli.drafters import (
        compose_for_drafters,
        find_drafter_folder,
        find_owning_run,
        open_drafter,
    )
    from draftlab.cli.hardware import apply_hardware, place_drafters
    from draftlab.cli.schema import ExportCommandSettings, settings_of
    from draftlab.drafters.store import read_card
    from draftlab.export.base import export_drafter, format_class, refuse_taken
    from draftlab.targets.load import load_target

    composed = compose_for_drafters("export", words)
    name = composed.data["drafter"]
    if not isinstance(name, str):
        raise ConfigError(
            f"drafter={composed.choices['drafter']} is a kind, not a trained drafter; pass "
            "drafter=RUN or a drafter's folder (`draftlab runs` lists the runs); ngram has nothing "
            "to export, servers have it built in"
        )
    source = find_drafter_folder(name)
    run = find_owning_run(str(source))
    settings = settings_of(ExportCommandSettings, composed)
    format_class(settings.export.format)
    folder = _folder(out, run, settings.export.format, name)
    refuse_taken(folder, settings.export)
    require_writable(folder.expanduser().absolute().parent, "pass out=FOLDER for another")
    history = read_card(source).extra
    length = history.get("train", {}).get("row_tokens")
    apply_hardware(settings.hardware, places_drafters=True)
    target = load_target(settings.target)
    place_drafters(target, settings.hardware)
    drafter = open_drafter(name, target)
    is_renamed = settings.export.target_name_or_path is not None
    return export_drafter(
        drafter,
        target.drafter_view,
        settings.export.model_copy(
            update={
                "target_name_or_path": settings.export.target_name_or_path
                or _servable_name(settings.target)
            }
        ),
        folder,
        target_revision=None if is_renamed else settings.target.revision,
        history={**history, "training_length": length, "checkpoint": _checkpoint(run, source)},
    )


def _folder(out: str | None, run: RunDir | None, form: str, name: str) -> Path:
    if out is not None:
        return Path(expand_home(out))
    if run is None:
        raise ConfigError(f"drafter {name} lies in no run; say where to write: out=FOLDER")
    return run.export_path(form)


def _checkpoint(run: RunDir | None, source: Path) -> str:
    """Name a checkpoint by its run, without saying where that lies on this machine."""
    return source.absolute().name if run is None else f"{run.path.name}/{source.name}"


def _servable_name(target: Any) -> str | None:
    """Give what a server can load; None leaves it to the target's own name."""
    if target.source == "demo":
        from draftlab.targets.demo import prepare_demo

        return str(prepare_demo(Path(target.cache_dir).expanduser()))
    if target.source in ("local", "gguf"):
        return str(Path(target.name).expanduser().absolute())
    return target.name
