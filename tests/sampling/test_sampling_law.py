"""What a law may be, and what is refused."""

import math

import pytest
import torch

from draftlab.errors import ConfigError
from draftlab.sampling import GREEDY, Sampling, SamplingRows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p=1.5"),
        ({"top_k": 5}, "cannot take effect at temperature 0"),
        ({"min_p": 0.1}, "cannot take effect at temperature 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"presence_penalty": math.inf}, "presence_penalty=inf"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1"),
        ({"logit_bias": ((-1, 0.5),)}, r"logit_bias ids \[-1\]"),
        ({"logit_bias": ((4, 0.5), (4, 1.0))}, r"logit_bias ids \[4, 4\]"),
        ({"logit_bias": ((4, math.inf),)}, "logit_bias of id 4 is inf"),
        ({"logit_bias": ((4, math.nan),)}, "logit_bias of id 4 is nan"),
    ],
)
def test_values_that_name_no_law_are_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**wrong)


def test_greedy_decoding_may_have_penalties_and_bias():
    law = Sampling(repetition_penalty=1.2, logit_bias=((3, -math.inf),), min_new_tokens=4)
    assert law.is_greedy
    assert law.reads_context


@pytest.mark.parametrize(
    ("law", "reads"),
    [
        (GREEDY, False),
        (Sampling(1.0, top_k=3, logit_bias=((1, 1.0),)), False),
        (Sampling(1.0, repetition_penalty=1.1), True),
        (Sampling(1.0, frequency_penalty=0.1), True),
        (Sampling(1.0, presence_penalty=0.1), True),
        (Sampling(min_new_tokens=1), True),
    ],
)
def test_penalties_and_a_least_length_read_the_context(law, reads):
    assert law.reads_context == reads
    assert SamplingRows.of([GREEDY, law], CPU).reads_context == reads
    assert not law.context_free.reads_context


def test_a_drafter_draws_at_the_temperature_alone():
    law = Sampling(0.7, top_k=3, top_p=0.9, logit_bias=((1, 1.0),), presence_penalty=0.5)
    assert law.drafting == Sampling(0.7)
    assert law.context_free == Sampling(0.7, top_k=3, top_p=0.9, logit_bias=((1, 1.0),))


def test_a_biased_id_must_be_the_targets():
    law = Sampling(logit_bias=((320, 1.0),))
    law.check_vocabulary(321)
    with pytest.raises(ConfigError, match=r"id 320, but the target has 320 ids; expected 0\.\.319"):
        law.check_vocabulary(320)


def test_rows_are_greedy_only_all_together():
    assert SamplingRows.of([GREEDY, Sampling(presence_penalty=1.0)], CPU).is_greedy
    assert not SamplingRows.of([GREEDY, Sampling(0.5)], CPU).is_greedy


def test_rows_are_selected_in_the_order_asked_for():
    laws = [GREEDY, Sampling(0.5), Sampling(2.0, top_k=4)]
    chosen = SamplingRows.of(laws, CPU).select([2, 0, 2])
    assert chosen.laws == (laws[2], laws[0], laws[2])
    assert chosen.temperature.tolist() == [2.0, 0.0, 2.0]
    assert chosen.drafting.laws == (Sampling(2.0), GREEDY, Sampling(2.0))


def test_rows_that_use_nothing_carry_nothing():
    rows = SamplingRows.of([Sampling(1.0), Sampling(1.0)], CPU)
    parts = [rows.divisors, rows.greedy, rows.bias, rows.penalties, rows.min_new_tokens]
    assert [*parts, rows.top_k, rows.top_p, rows.min_p] == [None] * 8
