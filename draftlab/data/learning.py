"""Which tokens are learned beyond the answers.

In: samples whose mask marks the answers. Out: the same samples, their prompts learned as well. The
target's law is defined after every token, whoever wrote it, and its hidden states over the prompts
are there already: where answers are few, prompts double the places to learn from.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftlab.data.packing import Sample


def learn_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Learn every token but those that all samples begin with, such as one system text.

    Args:
        samples: a whole data set; what all begin with is found among them.
    """
    shared = _shared_length(samples) if len(samples) > 1 else 0
    wider = []
    for sample in samples:
        mask = torch.ones_like(sample.mask)
        mask[:shared] = sample.mask[:shared]
        wider.append(replace(sample, mask=mask))
    return wider


def _shared_length(samples: Sequence[Sample]) -> int:
    """Count the tokens that all samples begin with."""
    first = samples[0].ids
    shared = min(len(sample) for sample in samples)
    for sample in samples[1:]:
        differs = (sample.ids[:shared] != first[:shared]).nonzero()
        if len(differs):
            shared = int(differs[0])
    return shared
