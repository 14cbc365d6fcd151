"""Prompts that are learned as well."""

import torch

from draftlab.data.learning import learn_prompts
from draftlab.data.packing import Sample


def _sample(ids: list[int], answer_from: int) -> Sample:
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[answer_from:] = True
    return Sample(0, "chat", torch.tensor(ids), mask)


def _learned(samples: list[Sample]) -> list[list[int]]:
    return [s.ids[s.mask].tolist() for s in learn_prompts(samples)]


def test_every_beginning_is_learned_once() -> None:
    # two system texts (1 2 and 1 5), questions behind them, answers last
    samples = [
        _sample([1, 2, 9, 4], 3),
        _sample([1, 5, 6, 4], 3),
        _sample([1, 2, 3, 4, 5], 4),
        _sample([1, 5, 7, 4], 3),
    ]

    assert _learned(samples) == [[9, 4], [5, 6, 4], [1, 2, 3, 4, 5], [7, 4]]
    assert [s.ids.tolist() for s in learn_prompts(samples)] == [s.ids.tolist() for s in samples]


def test_several_answers_to_one_prompt_learn_the_prompt_once() -> None:
    samples = [_sample([1, 2, 3, 8], 3), _sample([1, 2, 3, 7], 3)]

    assert _learned(samples) == [[8], [1, 2, 3, 7]]


def test_an_answer_that_samples_share_stays_learned_in_each() -> None:
    samples = [_sample([7, 8, 9], 1), _sample([7, 8, 9], 1)]

    assert _learned(samples) == [[7, 8, 9], [8, 9]]


def test_the_order_of_samples_does_not_matter() -> None:
    samples = [_sample([1, 2, 9, 4], 3), _sample([1, 2, 3, 4, 5], 4), _sample([1, 5, 6], 2)]

    assert _learned(samples)[::-1] == _learned(samples[::-1])
