"""Samples for a report: one answer a domain, if the evaluation was asked to keep answers."""

from draftlab.evaluation.files import Evaluation
from draftlab.reports.facts import Sample


def pick_samples(evaluation: Evaluation) -> tuple[Sample, ...]:
    """Take the first answer of every domain; nothing when `eval.samples` was off."""
    samples: dict[str, Sample] = {}
    for row in evaluation.answers:
        if "output_text" in row and row["domain"] not in samples:
            samples[row["domain"]] = Sample(row["domain"], row["prompt_text"], row["output_text"])
    return tuple(samples.values())
