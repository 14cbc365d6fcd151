import pytest

from draftlab.training.time_limit import TimeLimit


def alone(number):
    return number


@pytest.mark.parametrize(
    ("minutes", "rehearsals", "steps"),
    [
        # 60 s - 10 s of warming up - 3 steps of 1 s; 2 % of a minute would be one step
        (1.0, 4, 47),
        # 600 s - 10 s - 12 steps of 1 s
        (10.0, 13, 578),
        # never more than 20 steps
        (100.0, 21, 5970),
        # less time than measuring takes
        (0.1, 4, 1),
    ],
)
def test_a_time_limit_is_measured_and_pays_for_the_measuring(minutes, rehearsals, steps):
    done = []

    def rehearse(step):
        done.append(step)
        return 10.0 if step == 1 else 1.0

    assert TimeLimit(minutes, agree=alone).measure(rehearse) == steps
    assert done == list(range(1, rehearsals + 1))


def busy_start():
    """Ten minutes; 4 rehearsals of 6 s promise 96 steps, then a step takes 1 s."""
    limit = TimeLimit(10.0, agree=alone)
    assert limit.measure(lambda step: 6.0) == 96
    return limit


def test_a_busy_start_is_made_good_by_a_look():
    limit = busy_start()
    for _ in range(10):
        limit.add_step(1.0)
    assert limit.look(10) == 10 + 600 - 24 - 10


def test_a_pace_that_fell_shortens_the_training():
    limit = busy_start()
    for _ in range(10):
        limit.add_step(12.0)
    assert limit.look(10) == 10 + (600 - 24 - 120) // 12


def test_a_pause_takes_its_own_time_and_no_more():
    limit = busy_start()
    for seconds in (1.0, 1.0, 100.0, 1.0, 1.0):
        limit.add_step(seconds)
    assert limit.look(5) == 5 + 600 - 24 - 104


def test_a_look_counts_the_steps_since_the_one_before_only():
    limit = busy_start()
    for _ in range(10):
        limit.add_step(9.0)
    limit.look(10)
    for _ in range(14):
        limit.add_step(1.0)
    assert limit.look(24) == 24 + 600 - 24 - 90 - 14


def test_a_look_is_due_when_a_fifth_of_what_was_left_is_done():
    limit = busy_start()
    due = []
    for step in range(1, 61):
        limit.add_step(1.0)
        if limit.is_due(step, 60):
            limit.look(step)
            due.append(step)
    assert due == [10, 19, 26, 32, 37, 42, 47, 52, 57]


def test_a_training_that_grew_is_looked_at_again():
    limit = busy_start()
    for step in range(1, 6):
        limit.add_step(6.0)
        assert limit.is_due(step, 25) == (step == 5)
    limit.look(5)
    for step in range(6, 45):
        limit.add_step(1.0)
        assert not limit.is_due(step, 244)
    limit.add_step(1.0)
    assert limit.is_due(45, 244)


def test_no_time_left_still_ends_with_one_step():
    limit = TimeLimit(0.1, agree=alone)
    limit.measure(lambda step: 1.0)
    for _ in range(6):
        limit.add_step(3.0)
    assert limit.look(6) == 7


def test_every_process_follows_the_first_one():
    told = []

    def first_says(number):
        told.append(number)
        return 5.0

    limit = TimeLimit(1.0, agree=first_says)
    assert limit.measure(lambda step: 1.0) == 5
    for _ in range(5):
        limit.add_step(1.0)
    assert limit.look(3) == 8
    assert len(told) == 3


def run(limit, total, seconds):
    """Take steps that last seconds(step) until the plan, which follows every look, is done."""
    step = 0
    while step < total:
        step += 1
        limit.add_step(seconds(step))
        if limit.is_due(step, total):
            total = max(step, limit.look(step))
    return step


@pytest.mark.parametrize("slower", [3, 10, 30])
@pytest.mark.parametrize("since", [0, 100, 1000, 1800, 1950])
def test_a_slow_down_at_any_time_does_not_overrun_the_limit(slower, since):
    limit = TimeLimit(10.0, agree=alone)
    total = limit.measure(lambda step: 0.3)
    run(limit, total, lambda step: 0.3 * slower if step > since else 0.3)
    assert 570 <= limit.spent_s <= 660


def test_a_training_of_few_steps_ends_soon_after_its_time():
    limit = TimeLimit(1.0, agree=alone)
    assert limit.measure(lambda step: 2.0) == 26
    # the two steps use the time up; one more is what a look always allows
    assert run(limit, 26, lambda step: 30.0) == 3


def test_time_is_not_agreed_on_at_every_step():
    told = []

    def tell(number):
        told.append(number)
        return number

    limit = TimeLimit(10.0, agree=tell)
    total = limit.measure(lambda step: 0.3)
    run(limit, total, lambda step: 0.3)
    assert len(told) < 0.15 * total


def test_a_limit_goes_on_from_what_was_kept():
    def seconds(step):
        return 6.0 if step < 9 else 1.0

    whole = busy_start()
    for step in range(1, 12):
        whole.add_step(seconds(step))
    kept = TimeLimit(10.0, agree=alone, spent_s=whole.spent_s, counted_s=whole.counted_s)
    for step in range(12, 40):
        for limit in (whole, kept):
            limit.add_step(seconds(step))
        assert whole.is_due(step, 96) == kept.is_due(step, 96)
        if kept.is_due(step, 96):
            assert whole.look(step) == kept.look(step)
