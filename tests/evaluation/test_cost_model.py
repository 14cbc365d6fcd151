"""The cost model: parts measured apart, and words when they do not add up."""

import pytest

from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.host_share import HostShare
from draftlab.evaluation.cost_model import compare_with_model, measure_passes
from draftlab.evaluation.speed import measure
from draftlab.targets.tiny import tiny_target
from tests.evaluation.scripted import FakeClock, ScriptedDecoder

CURVE = TimeCurve((1, 4), (0.010, 0.012))
SHARES = {
    "plain": HostShare(num_rounds=10, round_s=0.1, target_s=0.1, drafter_s=0.0),
    "drafted": HostShare(num_rounds=10, round_s=0.16, target_s=0.12, drafter_s=0.04),
}


def compared(**drafted):
    clock = FakeClock()
    timings = measure(
        {
            "plain": ScriptedDecoder(clock, tokens=33, per_step=1, verify_s=0.010),
            "drafted": ScriptedDecoder(clock, tokens=33, per_step=4, **drafted),
        },
        [(1,), (2,)],
        max_new_tokens=33,
        warmup_prompts=0,
        repeats=1,
        seed=0,
        clock=clock,
    )
    model = compare_with_model(timings, arm="drafted", baseline="plain", curve=CURVE, shares=SHARES)
    assert model is not None
    return model


def test_parts_that_add_up_leave_no_gap():
    model = compared(verify_s=0.012, draft_s=0.004)
    assert model.predicted == pytest.approx(4 * 0.010 / 0.016)
    assert model.measured == pytest.approx(2.5)
    assert model.describe_gap("drafted") is None


def test_a_round_that_costs_more_than_its_parts_is_named_in_words():
    model = compared(verify_s=0.012, draft_s=0.008)
    assert model.measured == pytest.approx(2.0)
    told = model.describe_gap("drafted")
    assert told is not None
    assert told.startswith("drafted: measured 2.00x is 20% below the 2.50x")


def test_passes_are_timed_in_turns_and_the_first_is_left_out():
    seconds = iter([0, 9, 0, 9, 0, 1, 0, 2, 0, 3, 0, 4])

    class Clock:
        def read(self):
            return float(next(seconds))

    curve = measure_passes(
        tiny_target(num_hidden_layers=1), widths=[1, 3], base=4, rows=2, repeats=2, clock=Clock()
    )
    assert (curve.widths, curve.seconds) == ((1, 3), (2.0, 3.0))
