"""eval/<suite>/: summary.json, one line an answer, one line a verify step.

Answers and prompts stay out unless asked for; the numbers need none of them.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftlab.decoding.records import Generation
from draftlab.errors import CheckpointError
from draftlab.evaluation.results import EvalResult, read_result, result_to_json
from draftlab.files import write_atomic
from draftlab.runs.run_dir import write_json


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One answer of one arm.

    Attributes:
        arm: the drafter's name, or baseline.
        phase: acceptance (batched), speed (batch 1, timed).
        domain: of the prompt.
        prompt: index of the prompt within its domain.
        repeat: 0 for the first time.
        generation: the answer.
    """

    arm: str
    phase: Literal["acceptance", "speed"]
    domain: str
    prompt: int
    repeat: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation read back from its folder.

    Attributes:
        result: what was found.
        answers: the lines of generations.jsonl.
    """

    result: EvalResult
    answers: tuple[dict[str, Any], ...]


def read_eval(folder: Path) -> Evaluation:
    """Read an evaluation.

    Raises:
        CheckpointError: a file is missing or not what `write_eval` wrote.
    """
    result = read_result(folder / "summary.json")
    path = folder / "generations.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return Evaluation(result, tuple(json.loads(line) for line in lines))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; evaluate again") from None


def write_eval(
    folder: Path,
    result: EvalResult,
    records: Sequence[AnswerRecord],
    *,
    decode_text: Callable[[Sequence[int]], str] | None = None,
) -> None:
    """Write an evaluation. Lines of arms that `records` does not speak of are kept.

    Args:
        folder: the suite's folder.
        result: what was found, earlier stages merged in.
        records: answers of this stage.
        decode_text: makes text of ids; given, prompts and answers are written as ids and text.
    """
    arms = {record.arm for record in records}
    answers, steps = folder / "generations.jsonl", folder / "steps.jsonl"
    answer_rows = (_answer_row(record, decode_text) for record in records)
    _write_lines(answers, _other_arms(answers, arms), answer_rows)
    step_rows = (row for record in records for row in _step_rows(record))
    _write_lines(steps, _other_arms(steps, arms), step_rows)
    # last: where it stands, the lines stand too
    write_json(folder / "summary.json", result_to_json(result))


def _answer_row(
    record: AnswerRecord, decode_text: Callable[[Sequence[int]], str] | None
) -> dict[str, Any]:
    g = record.generation
    row: dict[str, Any] = {
        "arm": record.arm,
        "phase": record.phase,
        "domain": record.domain,
        "prompt": record.prompt,
        "repeat": record.repeat,
        "num_prompt_tokens": len(g.prompt_ids),
        "num_output_tokens": len(g.output_ids),
        "num_decoded_tokens": sum(step.num_emitted for step in g.steps),
        "finish": g.finish,
        "num_steps": len(g.steps),
        "first_token_s": g.first_token_s,
        "decode_s": g.decode_s,
    }
    if decode_text is not None:
        row |= {
            "prompt_ids": list(g.prompt_ids),
            "output_ids": list(g.output_ids),
            "prompt_text": decode_text(g.prompt_ids),
            "output_text": decode_text(g.output_ids),
        }
    return row


def _step_rows(record: AnswerRecord) -> Iterable[dict[str, Any]]:
    where = {
        "arm": record.arm,
        "phase": record.phase,
        "domain": record.domain,
        "prompt": record.prompt,
        "repeat": record.repeat,
    }
    for number, step in enumerate(record.generation.steps):
        yield {**where, "step": number, **asdict(step)}


def _other_arms(path: Path, arms: set[str]) -> list[str]:
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if json.loads(line)["arm"] not in arms]


def _write_lines(path: Path, kept: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    lines = [*kept, *(json.dumps(row) for row in rows)]
    write_atomic(path, "".join(line + "\n" for line in lines))
