"""Which rule runs for which way of decoding, and what is refused."""

import itertools
from typing import get_args

import pytest
import torch

from draftlab.decoding.verify import (
    RuleName,
    choose_rule,
    verify_block,
    verify_exact_match,
    verify_lossy_typical,
    verify_speculative,
)
from draftlab.drafters.tree import chain_of_points
from draftlab.errors import ConfigError
from draftlab.settings.locate import conf_dir

PLAIN = {"greedy": False, "tree": False, "draws": True, "lossy": False}


@pytest.mark.parametrize(
    ("way", "name", "verify", "points"),
    [
        ({"greedy": True}, "exact_match", verify_exact_match, False),
        ({"greedy": True, "tree": True}, "exact_match", verify_exact_match, False),
        ({}, "block", verify_block, False),
        ({"tree": True}, "without_replacement", verify_speculative, False),
        ({"draws": False}, "point_mass", verify_speculative, True),
        ({"draws": False, "tree": True}, "point_mass", verify_speculative, True),
    ],
)
def test_auto_takes_the_best_exact_rule(way, name, verify, points):
    rule = choose_rule("auto", **(PLAIN | way))
    assert (rule.name, rule.verify, rule.points) == (name, verify, points)
    assert not rule.is_lossy


def test_every_rule_has_a_way_of_decoding_and_auto_is_never_lossy():
    reached = set()
    for name, greedy, tree, draws, lossy in itertools.product(
        get_args(RuleName), *[[False, True]] * 4
    ):
        limits = {"typical": {"epsilon": 0.1, "delta": 0.3}, "threshold": {"threshold": 0.5}}
        try:
            rule = choose_rule(
                name, greedy=greedy, tree=tree, draws=draws, lossy=lossy, **limits.get(name, {})
            )
        except ConfigError:
            continue
        reached.add(name)
        assert rule.is_lossy == lossy == (name in limits)
        assert rule.name == name or name == "auto"
    assert reached == set(get_args(RuleName))


@pytest.mark.parametrize(
    ("name", "way", "message"),
    [
        ("speculative", {"greedy": True}, "speculative at temperature 0"),
        ("exact_match", {}, "exact_match at temperature above 0"),
        ("typical", {"greedy": True, "lossy": True}, "typical at temperature 0"),
        ("block", {"tree": True}, "block judges chains"),
        ("without_replacement", {}, "the drafter proposes chains"),
        ("without_replacement", {"tree": True, "draws": False}, "likeliest tokens"),
        ("typical", {"epsilon": 0.1, "delta": 0.3}, "decode.lossy=true allows it"),
        ("block", {"lossy": True}, "nothing to allow"),
        ("auto", {"lossy": True}, "nothing to allow"),
        ("typical", {"lossy": True, "epsilon": 0.1}, r"needs delta in \(0, 1\), and it is None"),
        ("threshold", {"lossy": True, "threshold": 1.5}, "it is 1.5"),
        ("block", {"threshold": 0.5}, "threshold=0.5 is not read by decode.rule=block"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(name, way, message):
    with pytest.raises(ConfigError, match=message):
        choose_rule(name, **(PLAIN | way))


def test_point_mass_asks_a_drawing_drafter_for_its_likeliest_tokens():
    assert choose_rule("point_mass", **PLAIN).points
    assert not choose_rule("speculative", **PLAIN).points


def test_a_chosen_lossy_rule_takes_the_arguments_of_the_others():
    rule = choose_rule("typical", **(PLAIN | {"lossy": True}), epsilon=0.2, delta=0.9)
    tree = chain_of_points(torch.tensor([[1]]))
    probs = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]])
    u = torch.tensor([0.5])
    verdict = rule.verify(tree, probs, accept_uniforms=u.unsqueeze(1), next_uniforms=u)
    alone = verify_lossy_typical(tree, probs, next_uniforms=u, epsilon=0.2, delta=0.9)
    assert verdict.num_accepted.tolist() == alone.num_accepted.tolist() == [1]


@pytest.mark.parametrize("key", ["epsilon", "delta", "threshold"])
def test_the_limits_of_lossy_rules_stand_in_the_yaml_as_they_are_checked(key):
    name = "threshold" if key == "threshold" else "typical"
    given = {"epsilon": 0.1, "delta": 0.3} if name == "typical" else {}
    with pytest.raises(ConfigError, match=rf"{key} in \(0, 1\)"):
        choose_rule(name, **{**PLAIN, "lossy": True, **given, key: 1.0})
    for path in (conf_dir() / "decode").glob("*.yaml"):
        (line,) = [x for x in path.read_text().splitlines() if x.startswith(f"lossy_{key}:")]
        assert "in (0, 1)" in line
