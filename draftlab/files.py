"""Files that are written whole or not at all, and fingerprints of files.

The only way anything of draftlab reaches a disk where a crash could leave half of it.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file so that its name only ever shows complete content, also after a power cut.

    Args:
        path: final name; its folder is made if need be.
        write: fills the temporary file it is given, which lies in the same folder.

    Raises:
        OSError: what the disk refused, under the file's own name.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with naming_refusals(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            force_to_disk(temporary)
            os.replace(temporary, path)
            force_to_disk(path.parent)
    finally:
        with contextlib.suppress(OSError):  # what went wrong first is what counts
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming_refusals(path: Path) -> Iterator[None]:
    """Let what a disk refuses inside name a file or folder of ours, whichever library wrote it.

    A full disk refuses bytes, not names: its error names nothing.

    Raises:
        OSError: of the same number, and its subclass.
    """
    try:
        yield
    except Exception as error:
        number = find_disk_error(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error


def find_disk_error(error: BaseException) -> int | None:
    """Find the errno of an operating system's refusal; None for errors of another kind.

    Libraries written in Rust, such as safetensors, give it in their text only.
    """
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a whole file from memory.

    Args:
        path: where; its folder is made when missing.
        content: text is written as UTF-8.
    """
    data = content.encode() if isinstance(content, str) else content

    def fill(temporary: Path) -> None:
        temporary.write_bytes(data)

    write_whole(path, fill)


def force_to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def force_tree_to_disk(folder: Path) -> None:
    """Wait until a folder and everything below it is on the disk."""
    for path in folder.rglob("*"):
        force_to_disk(path)
    force_to_disk(folder)


def compute_file_sha256(path: Path) -> str:
    """Compute the sha256 of a file's content (never of its name, size or time)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
