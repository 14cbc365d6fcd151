import pytest

from draftlab.targets.tiny import TINY_FAMILIES, tiny_target


@pytest.fixture(scope="session")
def targets():
    """One tiny float64 target a family, built when first asked for."""
    built = {}

    def get(family):
        if family not in built:
            built[family] = tiny_target(family)
        return built[family]

    return get


@pytest.fixture(params=TINY_FAMILIES)
def target(request, targets):
    return targets(request.param)
