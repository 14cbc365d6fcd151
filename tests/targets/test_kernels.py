from dataclasses import replace

import pytest
import torch
import yaml

from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.load import choose_kernels, load_target
from draftlab.targets.self_check import compare_doors
from draftlab.targets.settings import TargetSettings
from draftlab.targets.tiny import tiny_target


def settings(**changes):
    data = yaml.safe_load((conf_dir() / "target" / "tiny.yaml").read_text())
    return parse_settings(TargetSettings, {**data, "device": "cpu", **changes}, "target")


def test_auto_takes_the_fast_pass_where_it_equals_the_reference():
    target = load_target(settings(kernels="auto"))
    assert target.report["kernels"] == "fast"
    for name in ("logits", "taps", "final"):
        assert target.report[f"fast_{name}_difference"] < 1e-4
    assert isinstance(target.report["rows_bitwise_equal"], bool)


def test_auto_keeps_the_reference_elsewhere_and_says_why():
    target = load_target(settings(kernels="auto", family="gpt2"))
    assert target.report["kernels"] == "reference"
    assert "gpt2" in target.report["fast_refusal"]


def test_fast_is_an_error_where_it_cannot_serve():
    with pytest.raises(ConfigError, match=r"target\.kernels=fast does not serve tiny-gpt2"):
        load_target(settings(kernels="fast", family="gpt2"))


def test_reference_stays_the_reference():
    assert load_target(settings(kernels="reference")).report["kernels"] == "reference"


class Skewed:
    """The reference, with one kind of output a little off."""

    name = "skewed"

    def __init__(self, target, part):
        self.target, self.part = target, part

    def forward(self, kv, step, request, wants_logits):
        out = self.target.reference.forward(kv, step, request, wants_logits)
        wrong = out.logits if self.part == "logits" else getattr(out.features, self.part)
        if wrong is not None:
            wrong.mul_(1.01)
        return out


def test_a_pass_that_takes_packed_rows_for_one_text_is_refused():
    target = tiny_target("llama", torch.float32)

    class Joining:
        name = "joining"

        def forward(self, kv, step, request, wants_logits):
            alone = replace(step, segments=None)
            return target.reference.forward(kv, alone, request, wants_logits)

    with pytest.raises(UnsupportedTarget, match="joining kernels give other logits"):
        compare_doors(target.reference, Joining(), target.view, target.kv_shape)


@pytest.mark.parametrize("part", ["logits", "taps", "final"])
def test_a_pass_with_other_numbers_is_refused(part):
    target = tiny_target("llama", torch.float32)
    with pytest.raises(UnsupportedTarget, match=f"skewed kernels give other {part}"):
        compare_doors(target.reference, Skewed(target, part), target.view, target.kv_shape)


def test_a_wrong_fast_pass_is_not_taken(monkeypatch):
    target = tiny_target("llama", torch.float32)
    monkeypatch.setattr(
        "draftlab.targets.load.FastDoor", lambda model, config, windows: Skewed(target, "logits")
    )
    choose_kernels(target, "auto")
    assert target.report["kernels"] == "reference"
    assert "other logits" in target.report["fast_refusal"]
