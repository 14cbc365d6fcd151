"""Bytes: how many are free, and how to write them for people."""

import shutil
from pathlib import Path


def free_bytes(path: Path) -> int:
    """Count the free bytes of the disk that holds a folder, which need not exist yet."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def describe_bytes(size: int | None) -> str:
    """Write a number of bytes for people."""
    if size is None:
        return "unknown"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
