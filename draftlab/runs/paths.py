"""Where runs and reusable files go."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from draftlab.settings.base import Settings

HomePath = Annotated[Path, AfterValidator(Path.expanduser)]  # yaml may say ~ as well


class PathSettings(Settings):
    """Keys of conf/paths/*.yaml.

    Attributes:
        outputs: folder of all runs.
        cache: folder of what runs share and can make again: converted targets, answers.
    """

    outputs: HomePath
    cache: HomePath
