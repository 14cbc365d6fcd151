"""Where conf/ and recipes/ lie: inside an installed package, beside the package in a checkout."""

from pathlib import Path

from draftlab.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """Find the folder of primary configs and groups."""
    return _find("conf")


def recipes_dir() -> Path:
    """Find the folder of recipes."""
    return _find("recipes")


def checkout_dir() -> Path | None:
    """Find the source checkout this package runs from; None when it is installed as a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def recipe_names(folder: Path | None = None) -> list[str]:
    """List recipes as family/name, sorted.

    Args:
        folder: where to look; the shipped recipes when None.
    """
    root = folder or recipes_dir()
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")
    )


def _find(name: str) -> Path:
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"the folder {name}/ is neither in {_PACKAGE} nor beside it; the installation is "
        "incomplete: install draftlab again"
    )
