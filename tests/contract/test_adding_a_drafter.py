"""A new drafter is one new file and one new yaml; nothing that exists is edited."""

import shutil

import pytest
import torch
import yaml
from contract_kit import Session, some_ids, training_batch

import draftlab.drafters
from draftlab.drafters.base import Drafter, drafter_class, drafter_kinds
from draftlab.drafters.store import build_drafter, load_drafter, save_drafter
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.settings.base import parse_settings
from draftlab.settings.compose import compose
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target

CODE = '''
"""A drafter somebody added: a matrix on the final hidden state, one token deep."""

import torch
from pydantic import PositiveInt
from torch import nn

from draftlab.drafters.base import Drafter, DrafterSettings, DraftLoss
from draftlab.drafters.tree import chain_of_points
from draftlab.targets.features import FeatureRequest


class AddedSettings(DrafterSettings):
    width: PositiveInt


class Added(Drafter, kind="added", settings=AddedSettings):
    def __init__(self, settings, target):
        super().__init__()
        self.settings, self.target = settings, target
        size = target.spec.hidden_size
        self.net = nn.Sequential(nn.Linear(size, settings.width), nn.Linear(settings.width, size))

    @property
    def needs(self):
        return FeatureRequest(wants_final=True)

    def forward(self, batch, features, noise):
        b, t = batch.shifted_mask(2).nonzero(as_tuple=True)
        logits = self.target.head(self.net(features.final[b, t]))
        loss = nn.functional.cross_entropy(logits, batch.shifted_ids(2)[b, t])
        one = torch.ones(1, dtype=logits.dtype)
        return DraftLoss(loss, one * loss.item(), one * 0, one * 0, one)

    def open(self, slots, capacity, kv):
        return torch.zeros(slots, self.target.spec.hidden_size, dtype=self.target.dtype)

    def observe(self, state, seen):
        index = torch.arange(seen.rows.shape[0])
        state[seen.rows] = seen.final[index, seen.lengths - 1]

    def propose(self, state, budget, uniforms):
        logits = self.target.head(self.net(state[budget.rows]))
        best = logits[:, : self.target.spec.num_token_ids].argmax(-1, keepdim=True)
        return chain_of_points(best)

    def close(self, state, rows):
        state[rows] = 0
'''
YAML = "kind: added\nnum_draft_tokens: 1  # K\nwidth: 16  # of the hidden layer\n"


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Write the two files, in folders of their own; give the folder of configs."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "added.py").write_text(CODE)
    monkeypatch.setattr(draftlab.drafters, "__path__", [*draftlab.drafters.__path__, str(code)])
    conf = shutil.copytree(conf_dir(), tmp_path / "conf")
    (conf / "drafter" / "added.yaml").write_text(YAML)
    yield conf
    Drafter.by_kind.pop("added", None)


def test_one_file_and_one_yaml_are_enough_to_train_save_load_and_draft(added, tmp_path):
    assert "added" in drafter_kinds()
    data = compose("train", ["drafter=added", "drafter.width=8"], conf=added).data["drafter"]
    settings = parse_settings(drafter_class(data["kind"]).settings_class, data)
    assert set(yaml.safe_load(YAML)) == set(type(settings).model_fields)

    target = tiny_target()
    drafter = build_drafter(settings, target.view).to(target.dtype)
    batch = training_batch()
    features = target.read_features(batch, drafter.needs)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = drafter(batch, features, Noise(0)).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]

    save_drafter(drafter, tmp_path / "saved", extra={})
    loaded = load_drafter(tmp_path / "saved", target.view)
    session = Session(target, loaded)
    session.show(0, some_ids(5), anchor=1)
    assert session.propose([0], depth=1).num_nodes.tolist() == [1]


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown drafter kind 'medusaa'.*medusa, mtp, ngram"):
        drafter_class("medusaa")
