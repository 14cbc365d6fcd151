"""A drafter on another device than its target drafts, learns and is judged as beside it.

The other device is far_device.py's: it shows that no operation mixes the two.
"""

import pytest
import torch
from contract_kit import KINDS, make, some_ids, training_batch
from far_device import FAR, FarDevice, FarTensor, Mixed
from test_lossless_decoding import answers

from draftlab.drafters.base import num_trainable
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.targets.tiny import tiny_target

PROMPTS = [some_ids(n, seed=n) for n in (5, 9, 30)]
NEAR = ("self_speculative", "hybrid")  # they run the target's layers
FAST = ("medusa", "ngram")
BOTH = [
    pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow)
    for kind in KINDS
    if kind not in NEAR
]


@pytest.fixture(scope="module")
def near():
    return tiny_target()


@pytest.fixture(scope="module")
def far():
    target = tiny_target()
    with FarDevice():
        target.place_drafters(FAR)
    return target


def make_there(kind, target):
    """Build a drafter and move it, as commands do."""
    return make(kind, target).to(FAR)


def test_the_view_there_computes_what_the_view_here_does(near, far):
    ids, hidden = torch.arange(7), torch.linspace(-1, 1, 64, dtype=torch.float64).expand(3, -1)
    with FarDevice():
        view = far.drafter_view
        for name, given in (("embed", ids), ("head", hidden), ("final_norm", hidden)):
            found = getattr(view, name)(given.to(FAR))
            assert isinstance(found, FarTensor)
            assert torch.equal(found.cpu(), getattr(near.view, name)(given))
        for found, expected in zip(view.rope(ids.to(FAR)), near.view.rope(ids), strict=True):
            assert torch.equal(found.cpu(), expected)
        for name, weight in view.layer_state(1).items():
            assert isinstance(weight, FarTensor)
            assert torch.equal(weight.cpu(), near.view.layer_state(1)[name])
        assert isinstance(view.head_rows(torch.arange(3)), FarTensor)
        assert view.device == FAR
        assert far.view.device.type == "cpu"


def test_tied_tables_are_one_there_as_well():
    target = tiny_target(tie_word_embeddings=True)
    with FarDevice():
        view = target.view.on(FAR)
        anatomy = view._anatomy
        assert anatomy.embedding_weight is anatomy.head_weight
    assert target.view.on(target.device) is target.view


@pytest.mark.parametrize("kind", BOTH)
def test_a_drafter_there_drafts_as_beside_the_target(near, far, kind):
    beside = make(kind, near)
    sampled = {"temperature": 1.0, "top_p": 0.9}
    expected = [answers(near, beside, PROMPTS, **changes) for changes in ({}, sampled)]
    with FarDevice() as device:
        drafter = make_there(kind, far)
        assert all(isinstance(weight, FarTensor) for weight in drafter.parameters())
        before = device.crossings
        found = [answers(far, drafter, PROMPTS, **changes) for changes in ({}, sampled)]
        assert device.crossings > before
    assert found == expected


@pytest.mark.parametrize("kind", BOTH)
def test_a_drafter_there_has_the_same_loss_and_gradient(near, far, kind):
    beside = make(kind, near).train()
    if not num_trainable(beside):
        pytest.skip("it is not trained")
    batch = training_batch()
    expected = beside(batch, near.read_features(batch, beside.needs), Noise(0)).total
    expected.backward()
    with FarDevice() as device:
        drafter = make_there(kind, far).train()
        there = batch.to(FAR)
        features = far.read_features(there, drafter.needs).to(FAR)
        total = drafter(there, features, Noise(0)).total
        device.is_strict = False
        total.backward()
        assert total.item() == pytest.approx(expected.item(), rel=1e-9)
        norms = [
            sum(
                p.grad.double().pow(2).sum().item() for p in each.parameters() if p.grad is not None
            )
            for each in (drafter, beside)
        ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)


@pytest.mark.parametrize("kind", NEAR)
def test_a_drafter_that_runs_the_targets_layers_cannot_live_elsewhere(far, kind):
    with FarDevice():
        drafter = make_there(kind, far)
        with pytest.raises(ConfigError, match=r"pass hardware\.drafter_device=null"):
            answers(far, drafter, PROMPTS)


def test_tensors_of_two_devices_that_meet_are_noticed(far, monkeypatch):
    from draftlab.decoding import crossing

    monkeypatch.setattr(crossing, "_moved", lambda item, here, there: item)
    with FarDevice(), pytest.raises(Mixed):
        answers(far, make_there("medusa", far), PROMPTS)
