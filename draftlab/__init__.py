"""Train, prove, time and export drafters for lossless speculative decoding.

The public names below are imported when first used, so that `import draftlab` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftlab.cli.by_name import answer, encode_question, open_decoder, open_target
    from draftlab.cli.drafters import open_drafter
    from draftlab.decoding.decoder import Decoder
    from draftlab.evaluation.suite import evaluate
    from draftlab.runs.run_dir import open_run
    from draftlab.targets.target import Target

__all__ = [
    "Decoder",
    "Target",
    "answer",
    "encode_question",
    "evaluate",
    "open_decoder",
    "open_drafter",
    "open_run",
    "open_target",
]

_HOMES = {
    "Decoder": "draftlab.decoding.decoder",
    "Target": "draftlab.targets.target",
    "answer": "draftlab.cli.by_name",
    "encode_question": "draftlab.cli.by_name",
    "evaluate": "draftlab.evaluation.suite",
    "open_decoder": "draftlab.cli.by_name",
    "open_drafter": "draftlab.cli.drafters",
    "open_run": "draftlab.runs.run_dir",
    "open_target": "draftlab.cli.by_name",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its room."""
    if name not in _HOMES:
        raise AttributeError(f"module 'draftlab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
