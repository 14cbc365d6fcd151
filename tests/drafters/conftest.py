"""What tests of drafters get."""

import pytest

from draftlab.targets.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()
