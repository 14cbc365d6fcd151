import pytest

from draftlab.errors import ConfigError
from draftlab.evaluation.speed import compute_speed, measure
from tests.evaluation.scripted import FakeClock, ScriptedDecoder

PROMPTS = [(i,) for i in range(9)]


def timed(decoders, clock, *, repeats=1, warmup=0, prompts=PROMPTS):
    return measure(
        decoders,
        prompts,
        max_new_tokens=33,
        warmup_prompts=warmup,
        repeats=repeats,
        seed=0,
        clock=clock,
    )


def arms(clock, **drafter):
    plain = ScriptedDecoder(clock, tokens=33, per_step=1, verify_s=0.010, name="baseline")
    return {
        "baseline": plain,
        "drafter": ScriptedDecoder(clock, tokens=33, name="drafter", **drafter),
    }


def test_speedup_is_exact_under_a_fake_clock():
    clock = FakeClock()
    # four tokens a step that costs 0.012 + 0.004, against four steps of 0.010
    speed = compute_speed(
        timed(arms(clock, per_step=4, verify_s=0.012, draft_s=0.004), clock),
        arm="drafter",
        baseline="baseline",
    )
    assert speed.speedup.value == pytest.approx(0.040 / 0.016)
    assert speed.tau == pytest.approx(4.0)
    assert speed.step_ratio == pytest.approx(1.6)
    assert speed.draft_ratio == pytest.approx(0.4)
    assert speed.verify_ratio == pytest.approx(1.2)
    assert speed.predicted_speedup == pytest.approx(2.5)


def test_prefill_is_in_the_end_to_end_figure_only():
    clock = FakeClock()
    speed = compute_speed(
        timed(arms(clock, per_step=4, verify_s=0.010), clock), arm="drafter", baseline="baseline"
    )
    assert speed.speedup.value == pytest.approx(4.0)
    assert speed.end_to_end_speedup.value == pytest.approx((0.05 + 0.32) / (0.05 + 0.08))
    assert speed.first_token_s == speed.baseline_first_token_s == 0.05


def test_a_drafter_that_sleeps_is_reported_below_one():
    # case O-32: never right, 5 ms a proposal
    clock = FakeClock()
    speed = compute_speed(
        timed(arms(clock, per_step=1, verify_s=0.010, draft_s=0.005), clock),
        arm="drafter",
        baseline="baseline",
    )
    assert speed.speedup.value == pytest.approx(2 / 3)
    assert speed.speedup.high < 1


def test_warm_up_prompts_are_decoded_by_every_arm_and_not_timed():
    clock = FakeClock()
    both = arms(clock, per_step=2)
    timings = timed(both, clock, warmup=3)
    assert len(timings) == 2 * 9
    assert all(len(d.prompts) == 3 + 9 for d in both.values())
    first_read = clock.events.index("read")
    assert clock.events[:first_read].count("baseline") == 3


def test_the_clock_is_read_right_before_and_after_each_answer():
    clock = FakeClock()
    timed(arms(clock, per_step=2), clock)
    for start in range(0, len(clock.events), 3):
        before, arm, after = clock.events[start : start + 3]
        assert (before, after) == ("read", "read")
        assert arm in ("baseline", "drafter")


def test_arms_take_turns_in_both_orders_and_a_repeat_turns_each_around():
    clock = FakeClock()
    timings = timed(arms(clock, per_step=2), clock, repeats=2)
    firsts = [t.arm for t in timings[::2]]
    assert set(firsts[:9]) == {"baseline", "drafter"}
    assert all(a != b for a, b in zip(firsts[:9], firsts[9:], strict=True))


def test_too_few_prompts_give_a_ratio_without_an_interval():
    clock = FakeClock()
    timings = timed(arms(clock, per_step=2), clock)
    speed = compute_speed(timings, arm="drafter", baseline="baseline", prompts=range(3))
    assert speed.speedup.value == pytest.approx(2.0)
    assert speed.speedup.low is None
    assert speed.speedup.num_prompts == 3


def test_answers_of_one_token_have_no_decode_speed():
    clock = FakeClock()
    both = {
        n: ScriptedDecoder(clock, tokens=1, per_step=1, name=n) for n in ("baseline", "drafter")
    }
    assert compute_speed(timed(both, clock), arm="drafter", baseline="baseline") is None


def test_equal_outputs_are_counted():
    clock = FakeClock()
    timings = timed(arms(clock, per_step=4), clock)
    assert compute_speed(timings, arm="drafter", baseline="baseline").num_identical == 9


def test_answers_know_which_prompt_they_are_of():
    clock = FakeClock()
    timings = timed(arms(clock, per_step=4), clock)
    assert [t.generation.prompt_index for t in timings] == [t.prompt for t in timings]


def test_no_prompt_is_an_error_that_names_the_setting():
    with pytest.raises(ConfigError, match="speed_prompts_per_domain"):
        timed(arms(FakeClock(), per_step=2), FakeClock(), prompts=[])
