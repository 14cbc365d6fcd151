"""What a report is made from, beside the evaluation itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftlab.evaluation.results import EvalResult


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """How a drafter was trained.

    Attributes:
        drafter: its name in the evaluation.
        num_steps: optimizer steps.
        minutes: of training.
        num_tokens: answer tokens trained on, each counted once.
        num_conversations: conversations trained on.
        data: where they came from, in words.
        measured_step: step whose weights were evaluated; None where that is not known.
    """

    drafter: str
    num_steps: int
    minutes: float
    num_tokens: int
    num_conversations: int
    data: str
    measured_step: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and an answer; shown only when samples were asked for."""

    domain: str
    prompt: str
    output: str


@dataclass(frozen=True, slots=True)
class ReportInput:
    """Everything a report may show.

    Attributes:
        result: the evaluation, of as many stages as there are.
        training: one entry a trained drafter.
        metrics: rows of metrics.jsonl, for the training curve.
        samples: shown when not empty.
        run: what the run is called.
        pending: drafters that are still to be measured; the report says so.
        others: further evaluations of the run, by name; the report says where theirs are.
        provenance: of the evaluation; the report says which command made it, and when.
    """

    result: EvalResult
    training: Sequence[TrainingFacts] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Sample] = ()
    run: str = ""
    pending: Sequence[str] = field(default_factory=tuple)
    others: Sequence[str] = field(default_factory=tuple)
    provenance: Mapping[str, Any] = field(default_factory=dict)
