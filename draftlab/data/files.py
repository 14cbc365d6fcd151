"""Files written whole or not at all, and fingerprints of files."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file so that its name only ever shows complete content, also after a power cut.

    Args:
        path: final name; its folder is made if need be.
        write: fills the temporary file it is given, which lies in the same folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def compute_file_sha256(path: Path) -> str:
    """Compute the sha256 of a file's content (never of its name, size or time)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
