"""Prompts into the target's memory, in chunks; the last prompt token is left as the anchor.

In: rows that enter. Out: their keys and values written, and every position shown to who reads
along. The LM head never runs on prompt positions here.
"""

from collections.abc import Iterator

from draftlab.decoding.batch import Batch
from draftlab.decoding.slots import Sequence as Row
from draftlab.decoding.watching import Watchers
from draftlab.targets.step import Step
from draftlab.targets.target import Target


def prefill(
    target: Target, watchers: Watchers, batch: Batch, rows: list[Row], *, prefill_tokens: int
) -> None:
    """Run all prompt tokens but the last of some rows, and let them into the batch."""
    texts = target.encode(batch.kv, [row.slot for row in rows], [row.prompt_ids for row in rows])
    for row, text in zip(rows, texts, strict=True):
        row.text_ids = text
    for group in _groups(rows, prefill_tokens):
        longest = max(len(row.text_ids) for row in group) - 1
        width = max(1, prefill_tokens // len(group))
        for start in range(0, longest, width):
            _run_chunk(target, watchers, batch, group, start, min(start + width, longest))
    for row in rows:
        row.base = len(row.text_ids) - 1
        row.anchor = row.text_ids[-1]
    batch.enter(rows)


def _groups(rows: list[Row], prefill_tokens: int) -> Iterator[list[Row]]:
    """Group rows of like length, so that padding stays small, within the token budget."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.text_ids)):
        if group and (len(group) + 1) * len(row.text_ids) > prefill_tokens:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _run_chunk(
    target: Target, watchers: Watchers, batch: Batch, group: list[Row], start: int, stop: int
) -> None:
    # a row whose prompt has ended stays at its own end and runs dummies that nothing can see
    chunks = [row.text_ids[start : min(stop, len(row.text_ids) - 1)] for row in group]
    width = max(len(chunk) for chunk in chunks)
    bases = [min(start, len(row.text_ids) - 1) for row in group]
    ids = batch.ints([chunk + [0] * (width - len(chunk)) for chunk in chunks])
    slots = batch.ints([row.slot for row in group])
    step = Step(rows=slots, ids=ids, base=batch.ints(bases), live=max(bases) + width)
    step = step.within(target.spec.max_positions)
    out = target.run(batch.kv, step, request=watchers.request, wants_logits=False)
    if not watchers.are_there:
        return
    partners = [
        row.text_ids[base + 1 : base + 1 + len(chunk)]
        for row, base, chunk in zip(group, bases, chunks, strict=True)
    ]
    watchers.show(
        batch.state,
        [row.prompt_index for row in group],
        slots,
        ids,
        batch.ints([len(chunk) for chunk in chunks]),
        batch.ints([p + [0] * (width - len(p)) for p in partners]),
        out.features,
    )
