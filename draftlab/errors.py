"""What can go wrong, as one small tree.

Every message says what is wrong, the value seen, what was expected and what to do. The cli turns a
`DraftlabError` into one line on stderr and the exit code of its class; anything else is our bug.
"""


class DraftlabError(Exception):
    """Root of all errors a user can cause or cure. `exit_code` is the process's exit status."""

    exit_code = 1


class ConfigError(DraftlabError):
    """A setting, recipe, command line or combination of them that cannot work."""

    exit_code = 2


class DataError(DraftlabError):
    """Input data that cannot be used: missing, malformed, or with nothing to learn."""

    exit_code = 2


class TargetMismatch(DraftlabError):
    """A drafter and a target, or a tokenizer and a target, that do not belong together."""

    exit_code = 2


class UnsupportedTarget(DraftlabError):
    """A target that cannot do what is asked, such as a cache that cannot be rolled back exactly."""

    exit_code = 2


class NotExportable(DraftlabError):
    """A drafter that a serving format cannot express."""

    exit_code = 2


class ShapeMismatch(DraftlabError):
    """Tensors whose shapes do not belong together."""


class CheckpointError(DraftlabError):
    """A run folder or checkpoint that is missing, incomplete or of another run."""

    exit_code = 2


class LosslessViolation(DraftlabError):
    """Speculative output that is not what the target alone would have produced."""

    exit_code = 3
