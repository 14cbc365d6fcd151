"""Keys of conf/export/*.yaml. No torch here: commands that only compose import this."""

from pydantic import PositiveInt

from draftlab.settings.base import Settings


class ExportSettings(Settings):
    """How a trained drafter is written for a serving engine.

    Attributes:
        format: name of a file in draftlab/export, such as vllm or hf.
        num_draft_tokens: K of the serve command; None takes the drafter's own.
        target_name_or_path: how the serve command and the model card name the target; None takes
            the name it was loaded by.
        license: licence id for the model card; None takes the demo target's, else "other".
        overwrite: whether an earlier export in the same folder may be replaced.
    """

    format: str
    num_draft_tokens: PositiveInt | None
    target_name_or_path: str | None
    license: str | None
    overwrite: bool
