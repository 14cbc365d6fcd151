"""Some layers of a target through the fast door equal the same layers through transformers.

transformers takes its norms in float32 whatever the weights are, hence the tolerance.
"""

import pytest
import torch

from draftlab.targets.fast import FastDoor
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target


def prefilled(family, use_fast):
    """A target and its memory after a ragged prompt of two rows."""
    target = tiny_target(family)
    if use_fast:
        windows = [8 if family == "mistral" else None] * target.spec.num_layers
        target.use_door(FastDoor(target.model, target.config, windows))
    kv = target.open_kv(2, 40)
    ids = torch.randint(200, (2, 20), generator=torch.Generator().manual_seed(0))
    target.run(kv, Step(torch.tensor([0, 1]), ids, torch.tensor([0, 0]), 20))
    return target, kv


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 3), (2,)])
def test_the_fast_door_runs_the_layers_the_reference_runs(family, layers):
    ids, base = torch.tensor([[5], [6]]), torch.tensor([20, 11])
    step = Step(torch.tensor([0, 1]), ids, base, 21)
    found = []
    for use_fast in (False, True):
        target, kv = prefilled(family, use_fast)
        hidden = target.view.run_layers(kv, step, layers)
        found.append((hidden, kv.data.clone()))
    (expected, expected_kv), (hidden, kv) = found
    assert torch.allclose(hidden, expected, atol=1e-4)
    assert torch.allclose(kv, expected_kv, atol=1e-4)


def test_the_view_follows_the_door_that_is_in_use():
    target, kv = prefilled("llama", use_fast=True)
    step = Step(torch.tensor([0]), torch.tensor([[5]]), torch.tensor([20]), 21)
    asked = []

    class Watched(FastDoor):
        def run_layers(self, kv, step, layers):
            asked.append(layers)
            return super().run_layers(kv, step, layers)

    target.use_door(Watched(target.model, target.config, [None] * 4))
    target.view.run_layers(kv, step, (1, 2))
    assert asked == [(1, 2)]
    target.use_door(target.reference)
    target.view.run_layers(kv, step, (1, 2))
    assert asked == [(1, 2)]
