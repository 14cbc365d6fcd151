"""Answers given to the target again, token by token or several at a time: teacher forcing.

In: (prompt, output) pairs. Out: the logits that score places of the output. Nothing of the passes
that decoded them is used. Read first: run_at.
"""

from collections.abc import Sequence

import torch

from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.step import Step
from draftlab.targets.target import Target

Answer = tuple[tuple[int, ...], tuple[int, ...]]


def open_rows(
    target: Target, answers: Sequence[Answer], *, spare: int
) -> tuple[KVBuffers, list[Answer]]:
    """Allocate memory for answers side by side.

    Args:
        target: the target.
        answers: (prompt, output) pairs.
        spare: tokens that right padding may write past a row's end.

    Returns:
        The memory, and the pairs as rows of it: a target with an encoder has read the prompts, and
        its rows begin with its start token.
    """
    longest = max(len(prompt) + len(output) for prompt, output in answers)
    kv = target.open_kv(len(answers), longest + spare)
    slots, prompts = list(range(len(answers))), [list(prompt) for prompt, _ in answers]
    starts = target.encode(kv, slots, prompts)
    return kv, [(tuple(start), output) for start, (_, output) in zip(starts, answers, strict=True)]


def prefill_prompts(
    target: Target, kv: KVBuffers, answers: Sequence[Answer], prefill_tokens: int
) -> None:
    """Run all prompt tokens but the last, like the decoder."""
    contexts = [prompt[:-1] for prompt, _ in answers]
    longest = max(len(context) for context in contexts)
    width = max(1, prefill_tokens // len(answers))
    for start in range(0, longest, width):
        rows = [r for r, context in enumerate(contexts) if len(context) > start]
        chunks = [contexts[r][start : start + width] for r in rows]
        widest = max(len(chunk) for chunk in chunks)
        step = Step(
            rows=as_ints(target, rows),
            ids=as_ints(target, [_pad(chunk, widest) for chunk in chunks]),
            base=as_ints(target, [start] * len(rows)),
            live=start + widest,
        )
        target.run(kv, step, wants_logits=False)


def run_at(
    target: Target,
    kv: KVBuffers,
    answers: Sequence[Answer],
    rows: Sequence[int],
    place: int,
    *,
    width: int,
) -> Float[Tensor, "R T V"]:
    """Give the logits that score output tokens place..place+width-1 of some rows.

    Args:
        target: the target.
        kv: holds what stands before them.
        answers: (prompt, output) pairs, one a slot.
        rows: slots to run.
        place: first output token that is scored.
        width: T; places past the end of an output give logits that mean nothing.
    """
    texts = [answers[r][0] + answers[r][1] for r in rows]
    bases = [len(answers[r][0]) - 1 + place for r in rows]
    chunks = [_pad(text[b : b + width], width) for text, b in zip(texts, bases, strict=True)]
    step = Step(
        rows=as_ints(target, list(rows)),
        ids=as_ints(target, chunks),
        base=as_ints(target, bases),
        live=max(bases) + width,
    )
    logits = target.run(kv, step).logits
    assert logits is not None
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def as_ints(target: Target, values: list[int] | list[list[int]]) -> Int[Tensor, "..."]:
    """Put integers where the target is."""
    return torch.tensor(values, dtype=torch.int64, device=target.device)


def _pad(tokens: Sequence[int], width: int) -> list[int]:
    return [*tokens, *[0] * (width - len(tokens))]
