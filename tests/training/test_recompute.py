import pytest
import torch
import yaml
from toy_training import make_rows, toy_drafter

from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target
from draftlab.training.recompute import recompute_layers


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def build(kind, target):
    data = yaml.safe_load((conf_dir() / "drafter" / f"{kind}.yaml").read_text())
    if "draft_vocab_size" in data:
        data["draft_vocab_size"] = None
    settings = parse_settings(drafter_class(kind).settings_class, data)
    return build_drafter(settings, target.view, seed=1).train()


def gradients(drafter, target):
    rows = make_rows(target, [20, 30])
    batch = rows.tokens([0, 1])
    kept = 0

    def count(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0, 0)).total
    loss.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    return loss.detach(), found, kept


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "mtp", "hydra", "dflash", "dspark"])
def test_recomputing_keeps_every_bit_and_fewer_activations(kind, target):
    loss, expected, kept = gradients(build(kind, target), target)
    drafter = build(kind, target)
    assert recompute_layers(drafter) >= 1
    again, found, kept_now = gradients(drafter, target)
    assert torch.equal(loss, again)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert kept_now < kept


def test_names_of_weights_stay(target):
    plain, wrapped = build("eagle3", target), build("eagle3", target)
    recompute_layers(wrapped)
    assert list(wrapped.state_dict()) == list(plain.state_dict())


def test_a_drafter_without_such_layers_is_refused(target):
    with pytest.raises(ConfigError, match="toy_heads"):
        recompute_layers(toy_drafter(target))
