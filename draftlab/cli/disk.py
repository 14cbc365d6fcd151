"""Disks: how many bytes are free, whether a folder can be written, what a refusal means."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

from draftlab.errors import ConfigError
from draftlab.files import find_disk_error

_FULL = "free some space there, then give the same command"
_CLOSED = "choose a place that can be written, or change its permissions"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _CLOSED,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.ENOTDIR: "choose a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def free_bytes(path: Path) -> int:
    """Count the free bytes of the disk that holds a folder, which need not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def require_writable(folder: Path, advice: str = "pass paths.outputs=FOLDER for another") -> None:
    """Refuse a folder that cannot be made or written into; leaves nothing behind.

    Args:
        folder: need not exist yet.
        advice: what to do about it, in a few words.

    Raises:
        ConfigError: what is in the way.
    """
    there = _existing(folder)
    if not there.is_dir():
        raise ConfigError(f"cannot write into {folder}: {there} is no folder; {advice}")
    try:
        # permissions say little: root has all, and a mount may be read-only
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise ConfigError(f"cannot write into {folder}: {reason} ({there}); {advice}") from None


def explain_refusal(error: BaseException) -> str | None:
    """Say what a disk refused and what to do, in a sentence; None for errors of another kind."""
    number = find_disk_error(error)
    advice = _ADVICE.get(number) if number is not None else None
    if number is None or advice is None:
        return None
    place = getattr(error, "filename", None) or "a file"
    return f"cannot use {place}: {os.strerror(number).lower()}; {advice}"


def describe_bytes(size: int | None) -> str:
    """Write a number of bytes for people."""
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _existing(path: Path) -> Path:
    """Find the nearest folder above, or the path itself, that exists."""
    path = path.absolute()
    while not os.path.exists(path):  # unlike Path.exists, False where looking is forbidden
        path = path.parent
    return path
