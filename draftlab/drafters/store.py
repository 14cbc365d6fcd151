"""A drafter on disk: drafter.safetensors and drafter.json, nothing of the target, no pickle.

In: a drafter, or a folder. Out: the folder, or the drafter. Read save_drafter, then load_drafter.
drafter.json is written last and names the checksum of the tensors, so a half-written folder, or one
whose files are of two different moments, is told and never loaded.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftlab.drafters.base import Drafter, DrafterSettings, DraftVocabSettings, drafter_class
from draftlab.drafters.vocab import DraftVocab, vocab_for
from draftlab.errors import CheckpointError, ConfigError
from draftlab.files import compute_file_sha256, write_atomic, write_whole
from draftlab.randomness import derive_seed
from draftlab.settings.base import parse_settings
from draftlab.shapes import Int, Tensor
from draftlab.targets.spec import TargetSpec, check_same_target
from draftlab.targets.view import TargetView

log = logging.getLogger(__name__)

TENSORS = "drafter.safetensors"
CARD = "drafter.json"
_FORMAT = 1
_VOCAB = "draft_vocab_ids"


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What drafter.json says.

    Attributes:
        settings: as the drafter was built.
        target: the target it was trained for.
        sha256: of drafter.safetensors.
        aliases: tensors that are one with another: name -> name in the file.
        extra: whatever the writer added, such as step or metrics.
    """

    settings: DrafterSettings
    target: TargetSpec
    sha256: str
    aliases: dict[str, str]
    extra: dict[str, Any]


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
        drafter: of any kind; persistent state only, so nothing of the target.
        folder: made when missing.
        extra: plain data to keep with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors, aliases = _own_tensors(drafter)
    vocab = _vocab_of(drafter)
    if vocab is not None:
        tensors[_VOCAB] = vocab.ids.cpu().contiguous()
    write_whole(folder / TENSORS, lambda partial: save_file(tensors, partial))
    card = {
        "format": _FORMAT,
        "kind": drafter.kind,
        "settings": drafter.settings.model_dump(mode="json"),
        "target": drafter.target.spec.to_json(),
        "draft_vocab_size": None if vocab is None else vocab.size,
        "sha256": compute_file_sha256(folder / TENSORS),
        "aliases": aliases,
        "extra": extra,
    }
    write_atomic(folder / CARD, json.dumps(card, indent=2, ensure_ascii=False) + "\n")


def read_card(folder: Path) -> DrafterCard:
    """Read drafter.json alone: what kind of drafter this is, and for which target.

    Raises:
        CheckpointError: no drafter here, or a file that is not ours.
        ConfigError: settings that this version does not know.
    """
    path = folder / CARD
    missing = [name for name in (CARD, TENSORS) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} holds no complete drafter: {' and '.join(missing)} missing; expected a "
            "folder that draftlab train wrote"
        )
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, version = data["kind"], data["format"]
        target = TargetSpec.from_json(data["target"])
        rest = data["sha256"], data["aliases"], data["extra"]
        settings = data["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); use another checkpoint"
        ) from None
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this draftlab reads {_FORMAT}; use the version that "
            "wrote it"
        )
    parsed = parse_settings(drafter_class(kind).settings_class, settings, where=str(path))
    return DrafterCard(parsed, target, *rest)


def load_drafter(folder: Path, view: TargetView) -> Drafter:
    """Load a drafter for a target bit for bit as saved, with the draft vocabulary it was born with.

    Weights keep the dtype they were saved in. Differences between the targets that only cost
    acceptance are logged as warnings.

    Raises:
        CheckpointError: missing, incomplete or damaged.
        TargetMismatch: it was made for a target with another tokenizer or other shapes.
    """
    card = read_card(folder)
    for warning in check_same_target(card.target, view.spec, what=f"drafter {folder}"):
        log.warning(warning)
    path = folder / TENSORS
    found = compute_file_sha256(path)
    if found != card.sha256:
        raise CheckpointError(
            f"{path} has sha256 {found[:12]}, but {CARD} expects {card.sha256[:12]}: the folder is "
            "half-written or damaged; use another checkpoint"
        )
    tensors = load_file(path)
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
            f"{path} does not fit its own settings: {'; '.join(problems[:4])}; use another "
            "checkpoint"
        )
    for name, tensor in tensors.items():
        own[name].data = tensor  # the parameter stays the one that others may be tied to
    return drafter.to(view.device)


def _construct(settings: DrafterSettings, view: TargetView, vocab: DraftVocab | None) -> Drafter:
    build: Any = drafter_class(settings.kind)
    if isinstance(settings, DraftVocabSettings):
        return build(settings, view, vocab=vocab)
    return build(settings, view)


def _vocab_of(drafter: Drafter) -> DraftVocab | None:
    vocab = getattr(drafter, "vocab", None)
    assert vocab is None or isinstance(vocab, DraftVocab)
    return vocab


def _own_tensors(drafter: Drafter) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Give every tensor once, and the names that only repeat another (tied weights)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in drafter.state_dict().items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases
