import pytest
import yaml
from pydantic import ValidationError
from toy_training import optim_settings, train_settings

from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.training.settings import OptimSettings, TrainSettings


@pytest.mark.parametrize(
    ("file", "cls"),
    [
        ("optim/muon.yaml", OptimSettings),
        ("optim/adamw.yaml", OptimSettings),
        ("train/default.yaml", TrainSettings),
        ("train/smoke.yaml", TrainSettings),
    ],
)
def test_every_yaml_names_exactly_the_keys_of_its_class(file, cls):
    data = yaml.safe_load((conf_dir() / file).read_text(encoding="utf-8"))
    assert data.keys() == cls.model_fields.keys()
    parse_settings(cls, data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "muon", "adamw_lr": None}, "adamw_lr=None"),
        ({"kind": "adamw", "adamw_lr": 0.1}, "adamw_lr=0.1 has no effect"),
        (
            {"schedule": "wsd", "warmup_fraction": 0.7, "wsd_decay_fraction": 0.6},
            "warmup_fraction=0.7",
        ),
    ],
)
def test_settings_that_cannot_work_together_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        optim_settings(**changes)


def test_a_training_without_an_end_is_refused():
    with pytest.raises(ValidationError, match="would never end"):
        train_settings(max_steps=None, max_epochs=None, max_minutes=None)
