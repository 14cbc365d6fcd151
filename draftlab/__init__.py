"""Train, prove, time and export drafters for lossless speculative decoding.

The public names below are imported when first used, so that `import draftlab` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftlab.decoding.decoder import Decoder
    from draftlab.drafters.store import load_drafter
    from draftlab.evaluation.suite import evaluate
    from draftlab.runs.run_dir import open_run
    from draftlab.targets.target import Target

__all__ = ["Decoder", "Target", "evaluate", "load_drafter", "open_run"]

_HOMES = {
    "Decoder": "draftlab.decoding.decoder",
    "Target": "draftlab.targets.target",
    "evaluate": "draftlab.evaluation.suite",
    "load_drafter": "draftlab.drafters.store",
    "open_run": "draftlab.runs.run_dir",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its room."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftlab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
