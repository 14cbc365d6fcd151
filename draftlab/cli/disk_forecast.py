"""What a run writes, and what it downloads: bytes by name."""

from draftlab.cli.estimate import Estimate
from draftlab.cli.memory_forecast import Parts, count_moments
from draftlab.cli.schema import RunSettings

_STORED = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
_ANSWER_BYTES = 12  # a token's text and its id in a JSON list
_WIDE = 4


def forecast_disk(settings: RunSettings, estimate: Estimate) -> Parts:
    """Estimate what a run needs on disk, at answers of full length.

    Args:
        settings: everything the run is.
        estimate: of it.
    """
    parts: Parts = {}
    outline = estimate.outline
    if settings.target.source == "hub" and outline is not None:
        stored = outline.card.stored if outline.card else "bfloat16"
        parts["download of the target"] = outline.num_parameters * _STORED.get(stored, 2.0)
    workload = estimate.workload
    if workload is not None and workload.is_answered_here and not estimate.trains_nothing:
        parts["answers"] = workload.num_tokens * _ANSWER_BYTES
        if estimate.disk_bytes:
            parts["hidden states"] = estimate.disk_bytes
    if estimate.drafter is not None and not estimate.trains_nothing:
        numbers = estimate.drafter.num_parameters + count_moments(settings, estimate)
        kept = settings.train.keep_checkpoints + 1  # the best one besides
        parts[f"{kept} checkpoints"] = kept * numbers * _WIDE
    return parts
