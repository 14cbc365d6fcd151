"""Random numbers are a function of their names: batch-mates, order and global state do not count."""

import random

import numpy as np
import pytest
import torch

from draftlab.randomness import Noise, Purpose, derive_seed, uniforms

N = 40_000
# 3.3e-4 of correct generators fail a test at this many standard errors
BOUND = 3.6


def keys(count):
    return torch.arange(count)


def mean_is_off(numbers):
    """Standard errors between the mean and 1/2, of independent uniforms."""
    return abs(float(numbers.mean()) - 0.5) / (12 * len(numbers)) ** -0.5


def correlation_is_off(a, b):
    """Standard errors between the correlation of two streams and 0."""
    return abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) * len(a) ** 0.5


def test_a_rows_numbers_do_not_depend_on_its_batch_mates():
    rows, slots = torch.tensor([[4], [9], [2]]), keys(8)
    together = uniforms(7, rows, 3, slots, Purpose.DRAFT)
    for i, row in enumerate([4, 9, 2]):
        alone = uniforms(7, torch.tensor([[row]]), 3, slots, Purpose.DRAFT)
        assert torch.equal(together[i], alone[0])
    wider = uniforms(7, rows, 3, keys(20), Purpose.DRAFT)
    assert torch.equal(wider[:, :8], together)


def test_a_number_has_one_name_whatever_form_it_is_written_in():
    scalar = uniforms(1, 2, 3, 4)
    assert torch.equal(scalar, uniforms(1, torch.tensor(2), torch.tensor(3), 4))
    assert float(scalar) == float(uniforms(1, torch.tensor([[2]]), keys(9)[3], 4))


@pytest.mark.parametrize("at", range(5))
def test_every_part_of_the_name_counts(at):
    name = [3, 5, 7, 11, int(Purpose.ACCEPT)]
    other = [part + (i == at) for i, part in enumerate(name)]
    assert float(uniforms(*name)) != float(uniforms(*other))
    assert float(uniforms(*name)) != float(uniforms(*name[::-1]))


@pytest.mark.parametrize("first", list(Purpose))
def test_two_purposes_never_share_a_number(first):
    numbers = uniforms(0, 0, 0, keys(N), first)
    for second in Purpose:
        if second > first:
            others = uniforms(0, 0, 0, keys(N), second)
            # of 53-bit numbers, 1.6e9 pairs collide by chance with probability 2e-7
            assert not torch.isin(numbers, others).any()
            assert correlation_is_off(numbers, others) < BOUND


@pytest.mark.parametrize("place", range(4))
def test_numbers_are_uniform_along_every_part_of_the_name(place):
    name = [1, 2, 3, 4]
    numbers = uniforms(*[keys(N) if i == place else part for i, part in enumerate(name)])
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert mean_is_off(numbers) < BOUND
    assert correlation_is_off(numbers[:-1], numbers[1:]) < BOUND
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    chi_square = float(((counts - N / 64) ** 2 / (N / 64)).sum())
    assert chi_square < 103.4  # 1e-3 of correct generators, 63 degrees of freedom


def test_the_checks_above_see_a_mean_two_percent_off_and_a_shared_stream():
    numbers = uniforms(1, keys(N))
    assert mean_is_off(numbers**1.04) > BOUND
    assert correlation_is_off(numbers, 0.95 * uniforms(2, keys(N)) + 0.05 * numbers) > BOUND


def test_no_global_generator_is_read_or_moved():
    def states():
        return torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    before = states()
    samples = torch.zeros(2, 5, dtype=torch.int64)
    first = uniforms(1, keys(5)), Noise(3).uniform(samples, 4, "tap_noise")
    after = states()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(99)
    second = uniforms(1, keys(5)), Noise(3).uniform(samples, 4, "tap_noise")
    torch.set_rng_state(before[0])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_samples_noise_is_its_own_wherever_it_is_packed():
    noise = Noise(5, epoch=2)
    packed = torch.tensor([[8, 8, 8, 3, 3, -1], [4, 4, 4, 4, 4, 4]])
    got = noise.uniform(packed, 3, "tap_noise")
    alone = noise.uniform(torch.tensor([[-1, 3, 3]]), 3, "tap_noise")
    assert torch.equal(got[0, 3:5], alone[0, 1:])
    assert (got[0, 5] == 0.5).all()
    assert not torch.equal(got, noise.uniform(packed, 3, "mask"))
    assert not torch.equal(got, Noise(5, epoch=3).uniform(packed, 3, "tap_noise"))


def test_named_seeds_do_not_run_into_each_other():
    names = [("a", 1), ("a", 12), ("a1", 2), ("a", 1, 2), (1, "a")]
    seeds = {derive_seed(*name) for name in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
