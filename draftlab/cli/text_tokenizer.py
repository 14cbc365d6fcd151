"""The target's tokenizer before the target: its template alone tells what rendered text is."""

from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from draftlab.targets.demo import find_demo_file
from draftlab.targets.settings import TargetSettings
from draftlab.targets.tiny import tiny_tokenizer

_HUB_S = 3.0  # to answer; longer is as good as not there


def find_tokenizer(target: TargetSettings) -> PreTrainedTokenizerBase | None:
    """Load a target's tokenizer without its weights: a few megabytes, also from the hub.

    Args:
        target: of any source.

    Returns:
        None where it cannot be had; loading the target then says why.
    """
    name = target.name or ""
    try:
        match target.source:
            case "tiny":
                return tiny_tokenizer()
            case "demo":
                return _of_gguf(find_demo_file())
            case "gguf":
                return _of_gguf(Path(name).expanduser())
            case "local":
                return _load(str(Path(name).expanduser()), target, is_here=True)
            case "hub":
                return _load(name, target, is_here=not _answers(name, target.revision))
    except Exception:  # whatever transformers, the hub and their readers raise
        return None


def _of_gguf(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _load(place: str, target: TargetSettings, *, is_here: bool) -> Any:
    return AutoTokenizer.from_pretrained(
        place,
        revision=target.revision or "main",
        trust_remote_code=target.remote_code == "trust",
        local_files_only=is_here,
    )


def _answers(name: str, revision: str | None) -> bool:
    """Ask the hub once, where a download would go on asking."""
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_HUB_S)
    except Exception:
        return False
    return True
