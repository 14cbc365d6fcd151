"""Results are compared only where what made them is the same."""

import pytest
import yaml

from draftlab.decoding.settings import DecodeSettings
from draftlab.evaluation.conditions import describe_conditions
from draftlab.evaluation.settings import EvalSettings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target


@pytest.mark.parametrize(
    ("attention", "named"),
    [
        ("flash-attn 2.8.3", {"attention": "flash-attn 2.8.3"}),
        ("sdpa", {}),  # as in results from before there was a choice
        (None, {}),
    ],
)
def test_an_attention_kernel_is_a_condition_where_it_is_not_torchs_own(attention, named):
    def read(cls, name):
        return cls(**yaml.safe_load((conf_dir() / name).read_text()))

    target = tiny_target(num_hidden_layers=1)
    if attention is not None:
        target.report["attention"] = attention
    found = describe_conditions(
        target,
        {"chat": [[1, 2]]},
        read(EvalSettings, "eval/smoke.yaml"),
        read(DecodeSettings, "decode/greedy.yaml"),
    )
    assert {key: v for key, v in found.comparable.items() if key == "attention"} == named
