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

    A line of an arm without a drafter says which drafters it was timed beside: every stage has a
    baseline of its own, and speedups hold against that one alone.

    Args:
        folder: the suite's folder.
        result: what was found, earlier stages merged in.
        records: answers of this stage.
        decode_text: makes text of ids; given, prompts and answers are written as ids and text.
    """
    drafters = {arm.name for arm in result.arms}
    arms = [arm for arm in dict.fromkeys(r.arm for r in records) if arm in drafters]
    beside: dict[str, dict[str, Any]] = {
        r.arm: {} if r.arm in drafters else {"beside": arms} for r in records
    }
    answers, steps = folder / "generations.jsonl", folder / "steps.jsonl"
    answer_rows = (_answer_row(record, decode_text) | beside[record.arm] for record in records)
    _write_lines(answers, _kept_rows(answers, arms, drafters), answer_rows)
    step_rows = (row | beside[record.arm] for record in records for row in _step_rows(record))
    _write_lines(steps, _kept_rows(steps, arms, drafters), step_rows)
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


def _kept_rows(path: Path, anew: Sequence[str], drafters: set[str]) -> list[dict[str, Any]]:
    """Read the rows that stay: of drafters not measured anew, and of the baselines beside them."""
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    stay = dict.fromkeys(row["arm"] for row in rows if row["arm"] in drafters.difference(anew))
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row["arm"] in stay:
            kept.append(row)
        elif row["arm"] not in drafters:
            if "beside" not in row and stay:  # from before that was noted
                kept.append(row)
            elif beside := [arm for arm in row.get("beside", ()) if arm in stay]:
                kept.append(row | {"beside": beside})
    return kept


def _write_lines(
    path: Path, kept: Sequence[dict[str, Any]], rows: Iterable[dict[str, Any]]
) -> None:
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in (*kept, *rows)))
