import pytest
import torch
from toy_training import optim_settings, toy_drafter

from draftlab.errors import CheckpointError
from draftlab.targets.tiny import tiny_target
from draftlab.training.optim import build_optimizers, trainable_parameters
from draftlab.training.state import TrainingState


def make_state(target):
    drafter = toy_drafter(target)
    drafter.register_buffer("kept", torch.ones(3))
    drafter.register_buffer("made_anew", torch.ones(1000), persistent=False)
    optimizers = build_optimizers(drafter, optim_settings(kind="muon", adamw_lr=0.001))
    return drafter, TrainingState(drafter, trainable_parameters(drafter), optimizers, {})


def move(drafter, state):
    for parameter in state.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in state.optimizers:
        optimizer.step()
    drafter.kept.add_(1.0)


def test_a_state_put_into_a_fresh_drafter_moves_on_alike(tmp_path):
    target = tiny_target()
    drafter, state = make_state(target)
    move(drafter, state)
    saved = {name: tensor.detach().clone() for name, tensor in state.tensors().items()}
    assert "buffer/kept" in saved
    assert "buffer/made_anew" not in saved
    assert {"optim/hidden.weight/momentum_buffer", "optim/norm.weight/exp_avg_sq"} < saved.keys()

    fresh, restored = make_state(target)
    restored.put(saved, tmp_path)
    move(drafter, state)
    move(fresh, restored)
    expected, found = state.tensors(), restored.tensors()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_the_state_of_another_drafter_is_refused(tmp_path, damage):
    _, state = make_state(tiny_target())
    saved = dict(state.tensors())
    if damage == "missing":
        del saved["weight/norm.bias"]
    else:
        saved["weight/norm.bias"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"another drafter \(.*weight/norm\.bias"):
        state.put(saved, tmp_path)
