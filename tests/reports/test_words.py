from dataclasses import replace

from draftlab.evaluation.results import Defect, Estimate
from draftlab.reports.words import interval, speed_side, times, verdict, weights


def with_speedup(result, value, low, high):
    arms = tuple(
        replace(a, speed=replace(a.speed, speedup=Estimate(value, low, high, 36, "t")))
        for a in result.arms[-1:]
    )
    return replace(result, arms=arms)


def test_a_clear_speedup_is_said_with_its_interval_and_the_audit(result):
    told = verdict(with_speedup(result, 1.42, 1.35, 1.49))
    assert told.headline == (
        "eagle3 decodes 1.42x as fast (95 % CI 1.35–1.49) as the same engine without drafting, "
        "output unchanged."
    )
    assert told.tone == "good"
    assert any("0 defects in 3,456 output positions" in line for line in told.lines)
    assert any("lossless: yes" in line and "36 of 36" in line for line in told.lines)


def test_a_slowdown_is_said_plainly_with_the_reason(result):
    told = verdict(with_speedup(result, 0.91, 0.88, 0.95))
    assert told.headline.startswith("No drafter makes decoding faster here")
    assert "0.91x" in told.headline
    assert told.tone == "bad"
    assert any(line.startswith("Why: a verify step of eagle3 costs") for line in told.lines)


def test_an_interval_within_the_noise_floor_supports_no_claim(result):
    noisy = replace(
        with_speedup(result, 1.04, 1.01, 1.07), noise_floor=Estimate(1.0, 0.97, 1.03, 36, "t")
    )
    assert verdict(noisy).headline.startswith("No difference in speed can be claimed")


def test_a_step_cheaper_than_the_plain_one_it_contains_supports_no_claim(result):
    fast = with_speedup(result, 2.37, 1.3, 4.31)
    speed = fast.arms[0].speed
    slow_baseline = replace(speed, baseline_step_s=speed.step.total_s / 0.58)
    told = verdict(replace(fast, arms=(replace(fast.arms[0], speed=slow_baseline),)))
    assert told.headline.startswith("No difference in speed can be claimed")
    assert told.tone == "mixed"
    assert any("measured at 0.58 plain steps" in line for line in told.lines)
    assert verdict(fast).tone == "good"


def test_too_few_prompts_support_no_claim(result):
    few = with_speedup(result, 1.5, None, None)
    assert "too few to claim" in verdict(few).headline
    assert verdict(few).tone == "mixed"


def test_a_defect_outweighs_any_speed(result):
    arm = result.arms[-1]
    audit = replace(arm.audit, num_defects=2, defects=(Defect(0, 1, 2, 3, 4.0),))
    told = verdict(replace(result, arms=(result.arms[0], replace(arm, audit=audit))))
    assert told.headline.startswith("Do not use this: 2 output tokens")
    assert told.tone == "bad"
    assert any("lossless: NO" in line for line in told.lines)


def test_missing_speed_and_audit_are_said(result):
    bare = replace(result, arms=(replace(result.arms[-1], speed=None, audit=None),))
    headline = verdict(bare).headline
    assert "speed was not measured" in headline
    assert "not audited" in headline


def test_rounding_never_turns_a_slowdown_into_even():
    assert times(0.998) == "0.998x"
    assert times(1.0) == "1.00x"
    assert interval(Estimate(1.0, None, None, 3, "none")) == ""


def test_the_whole_interval_must_clear_one():
    assert speed_side(Estimate(1.2, 0.99, 1.4, 9, "t"), 0.0) == "unclear"
    assert speed_side(Estimate(1.2, 1.01, 1.4, 9, "t"), 0.0) == "faster"
    assert speed_side(Estimate(1.2, 1.01, 1.4, 9, "t"), 0.02) == "unclear"


def test_few_weights_are_not_written_as_none():
    assert [weights(n) for n in (16_640, 123_456, 7_200_000)] == ["16.6 K", "0.1 M", "7.2 M"]
    assert weights(123_456, 2) == "0.12 M"
