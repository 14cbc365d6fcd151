"""Which tokens are learned beyond the answers.

In: samples whose mask marks the answers. Out: the same samples, their prompts learned as well. The
target's law is defined after every token, whoever wrote it, and its hidden states over the prompts
are there already: where answers are few, prompts double the places to learn from.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from draftlab.data.packing import Sample
from draftlab.shapes import Int, Tensor


def mark_learned(samples: Sequence[Sample], learn: Literal["answers", "all"]) -> list[Sample]:
    """Mark what `data.learn` says is learned."""
    return learn_prompts(samples) if learn == "all" else list(samples)


def learn_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Learn prompts too, each beginning once: system texts stand in many samples.

    Of all samples with the same first tokens, the first in the order of their ids learns them; the
    others learn from where they part from it. Answers are learned everywhere, as before.

    Args:
        samples: a whole data set; the order of equal ones is kept.
    """
    ids = [sample.ids.tolist() for sample in samples]
    wider = list(samples)
    before: Int[Tensor, " T"] = torch.zeros(0, dtype=torch.int64)
    for number in sorted(range(len(samples)), key=ids.__getitem__):
        sample = samples[number]
        # among sorted texts, the one before shares the longest beginning
        shared = _shared_length(before, sample.ids)
        mask = torch.ones_like(sample.mask)
        mask[:shared] = sample.mask[:shared]
        wider[number] = replace(sample, mask=mask)
        before = sample.ids
    return wider


def _shared_length(one: Int[Tensor, " T"], other: Int[Tensor, " U"]) -> int:
    """Count the tokens that both begin with."""
    length = min(len(one), len(other))
    differs = (one[:length] != other[:length]).nonzero()
    return int(differs[0]) if len(differs) else length
