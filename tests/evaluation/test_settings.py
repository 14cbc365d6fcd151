from pathlib import Path

import pytest
import yaml

from draftlab.errors import ConfigError
from draftlab.evaluation.settings import EvalSettings
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir

FILES = sorted(Path(conf_dir(), "eval").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_key_stands_in_the_yaml(path):
    data = yaml.safe_load(path.read_text())
    assert set(data) == set(EvalSettings.model_fields)
    parse_settings(EvalSettings, data)


def test_draft_lengths_out_of_order_and_a_suite_that_is_no_folder_name_are_refused():
    data = yaml.safe_load(FILES[0].read_text())
    with pytest.raises(ConfigError, match="ascending"):
        parse_settings(EvalSettings, {**data, "draft_lengths": [4, 2]})
    with pytest.raises(ConfigError, match="folder"):
        parse_settings(EvalSettings, {**data, "suite": "../x"})
