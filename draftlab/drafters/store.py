"""A drafter on disk: drafter.safetensors and drafter.json, nothing of the target, no pickle.

In: a drafter, or a folder. Out: the folder, or the drafter. Read save_drafter, then load_drafter.
drafter.json is written last and names the checksum of the tensors, so a half-written folder, or one
whose files are of two different moments, is told and never loaded.

A drafter with adapters is saved as those alone, adapter.safetensors, and drafter.json says which
drafter they belong to and where that lies. It is looked for as BASE in the adapter's own folder
first, then at its place relative to that folder, then at its old place; the checksum decides.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftlab.drafters.adapters import (
    Adapter,
    BaseDrafter,
    adapter_tensors,
    merge,
    restore_adapter,
)
from draftlab.drafters.base import Drafter, DrafterSettings, DraftVocabSettings, drafter_class
from draftlab.drafters.vocab import DraftVocab, vocab_for
from draftlab.errors import CheckpointError, ConfigError
from draftlab.files import compute_file_sha256, write_atomic, write_whole
from draftlab.randomness import derive_seed
from draftlab.settings.base import parse_settings
from draftlab.shapes import Int, Tensor
from draftlab.targets.fingerprint import fingerprint_weights
from draftlab.targets.spec import TargetSpec, check_same_target
from draftlab.targets.view import TargetView

log = logging.getLogger(__name__)

TENSORS = "drafter.safetensors"
ADAPTER = "adapter.safetensors"
CARD = "drafter.json"
BASE = "base"
_FORMAT = 1
# keys that came after format 1, with the values that mean what drafters without them do
_LATER_KEYS = {
    "position_weights": "decay",
    "normalise": "sequence",
    "sliding_window": None,
    "reference": None,
    "learn_fraction": None,
}
_VOCAB = "draft_vocab_ids"


@dataclass(frozen=True, slots=True)
class SavedAdapter:
    """What drafter.json says of adapters.

    Attributes:
        rank: of a correction.
        alpha: corrections count alpha / rank times.
        base: the drafter below, at the place it had.
        relative: that place seen from the adapter's folder.
    """

    rank: int
    alpha: float
    base: BaseDrafter
    relative: str | None


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What drafter.json says.

    Attributes:
        settings: as the drafter was built.
        target: the target it was trained for.
        sha256: of drafter.safetensors, or of adapter.safetensors.
        aliases: tensors that are one with another: name -> name in the file.
        extra: whatever the writer added, such as step or metrics.
        adapter: None for a whole drafter.
    """

    settings: DrafterSettings
    target: TargetSpec
    sha256: str
    aliases: dict[str, str]
    extra: dict[str, Any]
    adapter: SavedAdapter | None

    @property
    def tensors_name(self) -> str:
        """Name of the file with the tensors."""
        return TENSORS if self.adapter is None else ADAPTER


def build_drafter(
    settings: DrafterSettings,
    view: TargetView,
    token_counts: Int[Tensor, " V"] | None = None,
    *,
    seed: int = 0,
) -> Drafter:
    """Build a new drafter, with a draft vocabulary chosen from the counts where it has one.

    Args:
        settings: of any kind.
        view: the target it will serve.
        token_counts: how often each target id is to be predicted in the training data; needed only
            when `draft_vocab_size` is set.
        seed: of the initial weights; the global generator is left as it was.

    Raises:
        ConfigError: a draft vocabulary is asked for without counts, or cannot have that size.
    """
    vocab = None
    size = settings.draft_vocab_size if isinstance(settings, DraftVocabSettings) else None
    if size is not None and size != view.spec.vocab_size:
        if token_counts is None:
            raise ConfigError(
                f"draft_vocab_size={size}: expected training data to count tokens in; pass data, "
                "or draft_vocab_size=null for the whole vocabulary"
            )
        vocab = vocab_for(view, size, token_counts)
        log.info(
            "draft vocabulary: %d ids, %.1f %% of tokens", size, 100 * vocab.coverage(token_counts)
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("init", seed))
        return _construct(settings, view, vocab)


def save_drafter(drafter: Drafter, folder: Path, *, extra: dict[str, Any]) -> None:
    """Write a drafter; whoever reads the folder meanwhile sees the old one or an error.

    Args:
        drafter: of any kind; persistent state only, so nothing of the target. With adapters, those
            alone.
        folder: made when missing.
        extra: plain data to keep with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    adapter, vocab = drafter.adapter, _vocab_of(drafter)
    file = folder / (TENSORS if adapter is None else ADAPTER)
    state = drafter.state_dict() if adapter is None else adapter_tensors(drafter)
    tensors, aliases = _each_once(state)
    if vocab is not None and adapter is None:
        tensors[_VOCAB] = vocab.ids.cpu().contiguous()
    write_whole(file, lambda partial: save_file(tensors, partial))
    card = {
        "format": _FORMAT,
        "kind": drafter.kind,
        "settings": drafter.settings.model_dump(mode="json"),
        "target": drafter.target.spec.to_json(),
        "draft_vocab_size": None if vocab is None else vocab.size,
        "sha256": compute_file_sha256(file),
        "aliases": aliases,
        "extra": extra,
        "adapter": None if adapter is None else _describe_adapter(adapter, folder),
    }
    write_atomic(folder / CARD, json.dumps(card, indent=2, ensure_ascii=False) + "\n")


def read_card(folder: Path) -> DrafterCard:
    """Read drafter.json alone: what kind of drafter this is, and for which target.

    Raises:
        CheckpointError: no drafter here, or a file that is not ours.
        ConfigError: settings that this version does not know.
    """
    path = folder / CARD
    _require(folder, CARD)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, version = data["kind"], data["format"]
        target = TargetSpec.from_json(data["target"])
        rest = data["sha256"], data["aliases"], data["extra"]
        settings = data["settings"]
        # whole drafters of earlier versions say nothing of adapters
        adapter = None if data.get("adapter") is None else _read_adapter(data["adapter"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint"
        ) from None
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this draftlab reads {_FORMAT}; use the version that "
            "wrote it"
        )
    cls = drafter_class(kind).settings_class
    earlier = {key: value for key, value in _LATER_KEYS.items() if key in cls.model_fields}
    parsed = parse_settings(cls, earlier | settings, where=str(path))
    card = DrafterCard(parsed, target, *rest, adapter)
    _require(folder, card.tensors_name)
    return card


def check_whole(folder: Path) -> None:
    """Read a drafter's files without building it.

    Raises:
        CheckpointError: no drafter here, tensors that are not those of its card, or adapters whose
            base is neither.
    """
    card = read_card(folder)
    _require_whole(folder, card)
    if card.adapter is not None and card.adapter.base.folder is not None:
        check_whole(_find_base(folder, card.adapter))


def load_drafter(folder: Path, view: TargetView) -> Drafter:
    """Load a drafter for a target bit for bit as saved, with the draft vocabulary it was born with.

    Weights keep the dtype they were saved in. Adapters are merged into those of their base.
    Differences between the targets that only cost acceptance are logged as warnings.

    Raises:
        CheckpointError: missing, incomplete or damaged, or an adapter whose base is gone.
        TargetMismatch: it was made for a target with another tokenizer or other shapes.
    """
    card = read_card(folder)
    if card.adapter is not None:
        drafter = load_adapted(folder, view)
        merge(drafter)
        return drafter
    tensors = _read_tensors(folder, card, view)
    ids = tensors.pop(_VOCAB, None)
    vocab = None if ids is None else DraftVocab(ids, view.spec.vocab_size)
    drafter = _construct(card.settings, view, vocab)
    own = drafter.state_dict(keep_vars=True)
    tensors |= {name: tensors[source] for name, source in card.aliases.items()}
    problems = [f"it has no {name}" for name in sorted(set(own) - set(tensors))]
    problems += [f"it has {name}" for name in sorted(set(tensors) - set(own))]
    for name in sorted(set(own) & set(tensors)):
        if own[name].shape != tensors[name].shape:
            found, wanted = list(tensors[name].shape), list(own[name].shape)
            problems.append(f"{name} has shape {found}, not {wanted}")
    if problems:
        raise CheckpointError(
            f"{folder / TENSORS} does not fit its own settings: {'; '.join(problems[:4])}; use "
            "another checkpoint"
        )
    for name, tensor in tensors.items():
        own[name].data = tensor  # the parameter stays the one that others may be tied to
    return drafter.to(view.device)


def load_adapted(folder: Path, view: TargetView) -> Drafter:
    """Load adapters beside the layers of their base, to be trained further.

    Raises:
        CheckpointError: no adapter here, one that is damaged, or one whose base is gone.
        TargetMismatch: it was made for a target with another tokenizer or other shapes.
    """
    card = read_card(folder)
    saved = card.adapter
    if saved is None:
        raise CheckpointError(f"{folder} holds a whole drafter; expected an adapter")
    tensors = _read_tensors(folder, card, view)
    if saved.base.folder is None:
        drafter = _construct(card.settings, view, None)
        base = BaseDrafter(None, fingerprint_weights(drafter))
        if base != saved.base:
            raise CheckpointError(
                f"adapter {folder} was trained on other weights ({saved.base.sha256[:12]}) than "
                f"its settings and target give now ({base.sha256[:12]}); put the model it started "
                "from back"
            )
    else:
        base = BaseDrafter(_find_base(folder, saved), saved.base.sha256)
        assert base.folder is not None
        drafter = load_drafter(base.folder, view)
    restore_adapter(
        drafter, tensors, rank=saved.rank, alpha=saved.alpha, base=base, source=folder / ADAPTER
    )
    return drafter.to(view.device)


def _find_base(folder: Path, saved: SavedAdapter) -> Path:
    assert saved.base.folder is not None
    near = [] if saved.relative is None else [folder.resolve() / saved.relative]
    places = [folder / BASE, *near, saved.base.folder]
    there = [place for place in places if (place / CARD).is_file()]
    for place in there:
        if read_card(place).sha256 == saved.base.sha256:
            return place.resolve()
    state = f"another one lies in {there[0]}" if there else f"{saved.base.folder} is gone"
    raise CheckpointError(
        f"adapter {folder} belongs to a drafter with sha256 {saved.base.sha256[:12]}, and {state}; "
        f"put that drafter's folder back, or copy or link it as {folder / BASE}"
    )


def _describe_adapter(adapter: Adapter, folder: Path) -> dict[str, Any]:
    base = adapter.base
    place = None if base.folder is None else base.folder.resolve()
    return {
        "kind": "lora",
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "base": {
            "path": None if place is None else str(place),
            "relative": None if place is None else os.path.relpath(place, folder.resolve()),
            "sha256": base.sha256,
        },
    }


def _read_adapter(data: Mapping[str, Any]) -> SavedAdapter:
    base = data["base"]
    place = None if base["path"] is None else Path(base["path"])
    return SavedAdapter(
        int(data["rank"]),
        float(data["alpha"]),
        BaseDrafter(place, str(base["sha256"])),
        base["relative"],
    )


def _require(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise CheckpointError(
            f"{folder} holds no complete drafter: {name} missing; expected a folder that draftlab "
            "train wrote"
        )


def _read_tensors(folder: Path, card: DrafterCard, view: TargetView) -> dict[str, Tensor]:
    """Read the tensors of a folder, if they are those of its card and the target's is this one."""
    for warning in check_same_target(card.target, view.spec, what=f"drafter {folder}"):
        log.warning(warning)
    _require_whole(folder, card)
    return load_file(folder / card.tensors_name)


def _require_whole(folder: Path, card: DrafterCard) -> None:
    path = folder / card.tensors_name
    found = compute_file_sha256(path)
    if found != card.sha256:
        raise CheckpointError(
            f"{path} has sha256 {found[:12]}, but {CARD} expects {card.sha256[:12]}: the folder is "
            "half-written or damaged; use another checkpoint"
        )


def _construct(settings: DrafterSettings, view: TargetView, vocab: DraftVocab | None) -> Drafter:
    build: Any = drafter_class(settings.kind)
    if isinstance(settings, DraftVocabSettings):
        return build(settings, view, vocab=vocab)
    return build(settings, view)


def _vocab_of(drafter: Drafter) -> DraftVocab | None:
    vocab = getattr(drafter, "vocab", None)
    assert vocab is None or isinstance(vocab, DraftVocab)
    return vocab


def _each_once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Give every tensor once, and the names that only repeat another (tied weights)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases
