"""The contract of a serving format, and the way from a drafter to a finished folder.

A format is one file `draftlab/export/<name>.py`; nothing else names it. Read export_drafter.

The folder appears whole or not at all: it is written beside its place, read back, checked against
the format's table, and renamed.
"""

import importlib
import os
import pkgutil
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import draftlab.export
from draftlab.drafters.base import Drafter
from draftlab.errors import ConfigError
from draftlab.export.card import Card, serve_command, write_card
from draftlab.export.settings import ExportSettings
from draftlab.export.table import CONFIG, read_config
from draftlab.files import (
    compute_file_sha256,
    force_to_disk,
    force_tree_to_disk,
    naming_refusals,
)
from draftlab.targets.view import TargetView

SUMS = "SHA256SUMS"
_LICENSES = {"demo": "apache-2.0"}
_NOT_FORMATS = frozenset({"base", "card", "settings", "table"})


@dataclass(frozen=True, slots=True)
class Served:
    """What a format says of the files it wrote.

    Attributes:
        architecture: of the drafter, such as "eagle3".
        method: vLLM's word for it in --speculative-config.
        library: `library_name` of the model card.
        about: what the network is, in a sentence or two.
        limits: what a user must know before serving it, a sentence each.
        max_draft_tokens: largest K that can be served, or None.
        usage: markdown on other ways to load it; may be empty.
        options: further keys of --speculative-config.
        overrides: keys that the target's config must have, for --hf-overrides.
    """

    architecture: str
    method: str
    library: str
    about: str
    limits: tuple[str, ...]
    max_draft_tokens: int | None
    usage: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExportResult:
    """A finished export.

    Attributes:
        folder: where it lies, absolute.
        format: name of the format.
        architecture: of the drafter.
        serve_command: starts vLLM with target and drafter.
        sha256: file name -> checksum, as in the folder's SHA256SUMS.
        num_bytes: of all files.
    """

    folder: Path
    format: str
    architecture: str
    serve_command: str
    sha256: dict[str, str]
    num_bytes: int


class ExportFormat(ABC):
    """Writes drafters for one engine: `class VllmFormat(ExportFormat, name="vllm")`."""

    name: ClassVar[str]
    by_name: ClassVar[dict[str, type["ExportFormat"]]] = {}

    def __init_subclass__(cls, *, name: str) -> None:
        """Record the name; it is the file's name too."""
        super().__init_subclass__()
        cls.name = name
        ExportFormat.by_name[name] = cls

    @abstractmethod
    def write(
        self, drafter: Drafter, target: TargetView, folder: Path, history: Mapping[str, Any]
    ) -> Served:
        """Write config, weights and whatever else the engine reads into an empty folder.

        Args:
            drafter: trained, for this target.
            target: what the engine will serve it with.
            folder: exists and is empty.
            history: how it was trained, as plain data.

        Raises:
            NotExportable: the engine cannot compute what this drafter computes.
        """

    @abstractmethod
    def check(self, folder: Path, target: TargetView) -> None:
        """Read a written folder back and compare it with the format's table.

        Raises:
            NotExportable: what differs.
        """


def format_names() -> list[str]:
    """List the known formats without importing any: the files of this room."""
    files = pkgutil.iter_modules(draftlab.export.__path__)
    return sorted(f.name for f in files if f.name not in _NOT_FORMATS and f.name[0] != "_")


def format_class(name: str) -> type[ExportFormat]:
    """Import the class of a format.

    Raises:
        ConfigError: no such format, with the known ones.
    """
    if name not in ExportFormat.by_name:
        if name not in format_names():
            raise ConfigError(
                f"unknown export format {name!r}; known formats: {', '.join(format_names())}"
            )
        importlib.import_module(f"draftlab.export.{name}")
    return ExportFormat.by_name[name]


def export_drafter(
    drafter: Drafter,
    target: TargetView,
    settings: ExportSettings,
    folder: Path,
    *,
    target_revision: str | None = None,
    history: Mapping[str, Any] | None = None,
) -> ExportResult:
    """Write a drafter in a serving format, with its model card and checksums.

    Args:
        drafter: trained, for this target.
        target: the target's identity, embedding and LM head.
        settings: format, and what the serve command says.
        folder: made by this call; appears only when everything is written and checked.
        target_revision: of a hub target, what the server takes; None takes its newest.
        history: how the drafter was trained (drafter.json's `extra`), shown in the card;
            `training_length`, in tokens, and `checkpoint`, a name, go into config.json too.

    Raises:
        NotExportable: the format cannot express this drafter.
        ConfigError: the folder is taken, or K is more than the drafter can draft.
    """
    form = format_class(settings.format)()
    folder = folder.expanduser().absolute()
    refuse_taken(folder, settings)
    history = history or {}
    depth = settings.num_draft_tokens or drafter.settings.num_draft_tokens
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    with naming_refusals(folder):
        part.mkdir(parents=True)
    try:
        with naming_refusals(folder):
            served = form.write(drafter, target, part, history)
        if served.max_draft_tokens is not None and depth > served.max_draft_tokens:
            raise ConfigError(
                f"export.num_draft_tokens={depth}: this {served.architecture} drafter can draft at "
                f"most {served.max_draft_tokens} tokens a step"
            )
        form.check(part, target)
        served_name = settings.target_name_or_path or target.spec.name
        command = serve_command(
            served_name,
            served.method,
            folder,
            depth,
            served.options,
            served.overrides,
            revision=target_revision,
        )
        card = Card(
            title=folder.name if folder.name != form.name else f"{served.architecture} drafter",
            # a folder of this machine says nothing to other readers
            base_model=target.spec.name if Path(served_name).is_absolute() else served_name,
            revision=target_revision,
            license=settings.license or _LICENSES.get(target.spec.source, "other"),
            library=served.library,
            architecture=served.architecture,
            about=served.about,
            command=command,
            usage=served.usage,
            limits=served.limits,
        )
        write_card(part / "README.md", card, target.spec, history)
        sums = _write_sums(part)
        size = sum(path.stat().st_size for path in part.rglob("*") if path.is_file())
        _put_in_place(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return ExportResult(folder, form.name, served.architecture, command, sums, size)


def describe_origin(folder: Path) -> str | None:
    """Say what an exported folder was made of; None when it is no export."""
    if not (folder / SUMS).is_file():
        return None
    run = folder.absolute().parent.parent
    if (run / "config.yaml").is_file():
        return f"the run {run}"
    if (folder / CONFIG).is_file():
        made_of = read_config(folder).get("draftlab", {}).get("checkpoint")
        if made_of is not None:
            return f"the checkpoint {made_of}"
    return "the run or checkpoint"


def refuse_taken(folder: Path, settings: ExportSettings) -> None:
    """Refuse a folder that may not be replaced; only an earlier export ever may.

    Raises:
        ConfigError: it holds something.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / SUMS).is_file():
        raise ConfigError(
            f"{folder} exists and is no export (it has no {SUMS}), so it is never replaced; choose "
            "another with out=FOLDER"
        )
    if not settings.overwrite:
        raise ConfigError(
            f"{folder} holds an earlier export; pass export.overwrite=true to replace it, or "
            "out=FOLDER to write elsewhere"
        )


def _write_sums(folder: Path) -> dict[str, str]:
    """Write SHA256SUMS, which `sha256sum -c` reads."""
    sums = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sums[path.relative_to(folder).as_posix()] = compute_file_sha256(path)
    lines = [f"{digest}  {name}\n" for name, digest in sums.items()]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return sums


def _put_in_place(part: Path, folder: Path) -> None:
    force_tree_to_disk(part)
    old = None
    if folder.exists():
        # a folder cannot be renamed onto a full one, so the earlier export steps aside first
        old = part.with_suffix(".old")
        os.replace(folder, old)
    os.replace(part, folder)
    force_to_disk(folder.parent)
    if old is not None:
        shutil.rmtree(old)
