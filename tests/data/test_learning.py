"""Prompts that are learned as well."""

import torch

from draftlab.data.learning import learn_prompts
from draftlab.data.packing import Sample


def _sample(ids: list[int], answer_from: int) -> Sample:
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[answer_from:] = True
    return Sample(0, "chat", torch.tensor(ids), mask)


def test_all_is_learned_past_what_every_sample_begins_with() -> None:
    samples = [_sample([1, 2, 3, 4, 5], 4), _sample([1, 2, 9, 4], 3), _sample([1, 2, 3, 4], 3)]

    wider = learn_prompts(samples)

    assert [s.mask.tolist() for s in wider] == [
        [False, False, True, True, True],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert [s.ids.tolist() for s in wider] == [s.ids.tolist() for s in samples]


def test_an_answer_that_all_samples_share_stays_learned() -> None:
    samples = [_sample([7, 8, 9], 1), _sample([7, 8, 9], 1)]

    assert [s.mask.tolist() for s in learn_prompts(samples)] == [[False, True, True]] * 2


def test_one_sample_alone_shares_nothing() -> None:
    assert learn_prompts([_sample([7, 8, 9], 2)])[0].mask.all()
