"""Settings as conf/ ships them, with a few changed."""

import yaml

from draftlab.settings.locate import conf_dir


def settings_from(cls, name, **changes):
    """Read conf/NAME into its Settings class."""
    return cls(**{**yaml.safe_load((conf_dir() / name).read_text()), **changes})
