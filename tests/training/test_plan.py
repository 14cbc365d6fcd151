import json

import pytest
from toy_training import train_settings

from draftlab.errors import CheckpointError
from draftlab.training.plan import TrainingPlan, steps_within_limits


def plan(**changes):
    plain = {
        "drafter": {"kind": "medusa", "num_heads": 4},
        "target_checksum": "0" * 64,
        "optim": {"lr": 0.1, "betas": (0.9, 0.95)},
        "limits": {"max_steps": None, "max_minutes": 3.0},
        "rows_checksum": "f" * 64,
        "seed": 1,
        "step_rows": 8,
        "total_steps": 77,
    }
    return TrainingPlan(**(plain | changes))


def test_a_resumed_plan_keeps_the_number_of_steps_it_began_with(tmp_path):
    plan().write(tmp_path)
    assert plan(total_steps=0).resume(tmp_path) == plan()


def test_every_difference_is_named(tmp_path):
    plan().write(tmp_path)
    changed = plan(seed=2, step_rows=4, optim={"lr": 0.2, "betas": (0.9, 0.95)})
    with pytest.raises(CheckpointError) as caught:
        changed.resume(tmp_path)
    text = str(caught.value)
    assert "optim.lr: began with 0.1, now 0.2" in text
    assert "seed: began with 1, now 2" in text
    assert "step_rows: began with 8, now 4" in text
    assert "betas" not in text


def test_a_damaged_plan_is_an_error(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps({"seed": 1})[:-2])
    with pytest.raises(CheckpointError, match="damaged"):
        plan().resume(tmp_path)


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        ({"max_steps": 9, "max_epochs": None}, 9),
        ({"max_steps": None, "max_epochs": 1.5}, 6),
        ({"max_steps": 9, "max_epochs": 2}, 8),
        ({"max_steps": None, "max_epochs": 0.01}, 1),
        ({"max_steps": None, "max_epochs": None, "max_minutes": 1.0}, None),
    ],
)
def test_the_first_limit_counts(limits, steps):
    assert steps_within_limits(train_settings(**limits), steps_per_epoch=4) == steps


def test_steps_before_a_look_at_the_pace_keep_their_schedule(tmp_path):
    looked = plan().look(8, 200).look(50, 190)
    assert [looked.total_at(step) for step in (1, 8, 9, 50, 51)] == [77, 77, 200, 200, 190]
    looked.write(tmp_path)
    assert plan(total_steps=0).resume(tmp_path) == looked
