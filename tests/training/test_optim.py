import pytest
import torch
from torch import nn
from toy_training import optim_settings, toy_drafter

from draftlab.targets.tiny import tiny_target
from draftlab.training.optim import build_optimizers, set_lr


@pytest.fixture(scope="module")
def drafter():
    drafter = toy_drafter(tiny_target())
    drafter.embed = nn.Embedding(7, 8)
    drafter.lm_head = nn.Linear(8, 11)
    drafter.stacked = nn.Parameter(torch.zeros(3, 4, 4))
    drafter.column = nn.Parameter(torch.zeros(4, 1))
    drafter.frozen = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    return drafter


def grouped(drafter, settings):
    names = {id(p): name for name, p in drafter.named_parameters()}
    return {
        names[id(p)]: (type(optimizer).__name__, group["weight_decay"], group["lr"])
        for optimizer in build_optimizers(drafter, settings)
        for group in optimizer.param_groups
        for p in group["params"]
    }


def test_muon_moves_hidden_matrices_and_adamw_all_else(drafter):
    settings = optim_settings(kind="muon", lr=0.003, adamw_lr=0.0003, weight_decay=0.1)
    assert grouped(drafter, settings) == {
        "hidden.weight": ("Muon", 0.1, 0.003),
        "hidden.bias": ("AdamW", 0.0, 0.0003),
        "norm.weight": ("AdamW", 0.0, 0.0003),
        "norm.bias": ("AdamW", 0.0, 0.0003),
        "heads.0.weight": ("AdamW", 0.1, 0.0003),  # told by the vocabulary's size
        "heads.1.weight": ("AdamW", 0.1, 0.0003),
        "embed.weight": ("AdamW", 0.0, 0.0003),
        "lm_head.weight": ("AdamW", 0.1, 0.0003),  # told by its name
        "lm_head.bias": ("AdamW", 0.0, 0.0003),
        "stacked": ("AdamW", 0.1, 0.0003),
        "column": ("AdamW", 0.1, 0.0003),
    }


def test_adamw_moves_everything_at_one_rate(drafter):
    found = grouped(drafter, optim_settings(kind="adamw", lr=0.001, weight_decay=0.01))
    assert {kind for kind, _, _ in found.values()} == {"AdamW"}
    assert {lr for _, _, lr in found.values()} == {0.001}
    assert found["hidden.weight"][1] == 0.01
    assert found["norm.weight"][1] == 0.0


def test_the_rate_is_set_as_a_share_of_each_groups_peak(drafter):
    optimizers = build_optimizers(drafter, optim_settings(kind="muon", lr=0.1, adamw_lr=0.01))
    for factor in (0.5, 0.25):
        set_lr(optimizers, factor)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert rates == [0.1 * factor, 0.01 * factor, 0.01 * factor]
