import pytest
from toy_training import optim_settings

from draftlab.training.schedule import lr_factor


def factors(total: int, **changes):
    settings = optim_settings(**changes)
    return {step: lr_factor(step, total, settings) for step in range(1, total + 1)}


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd", "constant"])
def test_the_warm_up_rises_to_the_peak_at_its_last_step(schedule):
    found = factors(100, schedule=schedule, warmup_fraction=0.1)
    assert [found[step] for step in (1, 5, 10)] == [0.1, 0.5, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_last_step_has_the_smallest_rate(schedule):
    found = factors(100, schedule=schedule, warmup_fraction=0.1, min_lr_fraction=0.05)
    assert found[100] == pytest.approx(0.05)
    falling = [found[step] for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)


def test_half_way_down_a_line_and_a_cosine_are_at_the_middle():
    for schedule in ("linear", "cosine"):
        found = factors(101, schedule=schedule, warmup_fraction=0.0, min_lr_fraction=0.0)
        assert found[1] == 1.0
        assert found[51] == pytest.approx(0.5)


def test_wsd_stays_at_the_peak_until_its_decay():
    found = factors(
        100, schedule="wsd", warmup_fraction=0.1, wsd_decay_fraction=0.2, min_lr_fraction=0.0
    )
    assert all(found[step] == 1.0 for step in range(10, 81))
    assert found[90] == pytest.approx(0.5)


def test_constant_never_falls():
    found = factors(50, schedule="constant", warmup_fraction=0.0)
    assert set(found.values()) == {1.0}


def test_a_single_step_uses_the_peak():
    assert factors(1, schedule="linear", warmup_fraction=0.01) == {1: 1.0}
