"""Where a bench writes its JSON, settled before it measures anything."""

from pathlib import Path

from draftlab.cli.disk import require_writable
from draftlab.errors import ConfigError


def find_out(given: str, default: Path) -> Path:
    """Find the file to write, and refuse one that could not be written.

    A folder that was typed must be there, so that a slip of the pen makes none.

    Args:
        given: what `bench.out=` says; empty takes the default.
        default: its folder is made when the file is written.

    Raises:
        ConfigError: what is in the way, and what to pass.
    """
    if not given:
        require_writable(default.parent)
        return default
    out = Path(given).expanduser()
    if out.is_dir():
        raise ConfigError(f"bench.out={given} is a folder; pass bench.out=FOLDER/FILE.json")
    if not out.parent.is_dir():
        raise ConfigError(
            f"bench.out={given} is to lie in {out.parent}, which is no folder here; make it first, "
            f"or pass another bench.out=FILE.json; without one it is {default}"
        )
    require_writable(out.parent, "pass another bench.out=FILE.json")
    return out
