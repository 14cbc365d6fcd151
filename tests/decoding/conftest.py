import pytest
import torch

from draftlab.targets.tiny import tiny_target


@pytest.fixture(scope="session")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="session")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 1, 17, 30, 9, 12, 40)
    ]
