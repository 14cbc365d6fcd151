"""The search for layers to skip: what it tries, what it finds, and how it goes on."""

import pytest
import torch
import yaml

from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.self_speculative import SelfSpeculativeSettings
from draftlab.errors import ConfigError
from draftlab.evaluation.skip_search import (
    SkipMeter,
    SkipTrial,
    search_skip_layers,
    starting_choices,
)
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target


class ScriptedMeter:
    """A target whose best choice is known: every layer off it costs speed."""

    def __init__(self, best, num_layers=8):
        self.best, self.num_layers = set(best), num_layers
        self.asked = []

    def measure(self, skip_layers):
        self.asked.append(skip_layers)
        wrong = len(self.best ^ set(skip_layers))
        return SkipTrial(skip_layers, tau=2.0, step_s=0.01 * 1.1**wrong)

    def measure_plain(self):
        return 60.0


@pytest.mark.parametrize("best", [(1, 3, 5), (2,), (3, 4, 5, 6), (1, 2, 6)])
def test_the_search_walks_to_the_fastest_choice(best):
    found = search_skip_layers(ScriptedMeter(best), max_trials=200, seed=0)
    assert found.best.skip_layers == best
    assert found.is_settled
    speeds = [trial.tokens_per_s for trial in found.trials]
    assert speeds == sorted(speeds, reverse=True)


def test_no_choice_is_measured_twice_and_none_past_the_limit():
    meter = ScriptedMeter((1, 2, 6))
    found = search_skip_layers(meter, max_trials=11, seed=0)
    assert len(meter.asked) == len(set(meter.asked)) == len(found.trials) == 11
    assert not found.is_settled


def test_an_interrupted_search_goes_on_as_if_it_had_not_been():
    whole = ScriptedMeter((1, 2, 6))
    expected = search_skip_layers(whole, max_trials=30, seed=3)
    noted = []
    search_skip_layers(ScriptedMeter((1, 2, 6)), max_trials=9, seed=3, on_trial=noted.append)
    rest = ScriptedMeter((1, 2, 6))
    found = search_skip_layers(rest, max_trials=30, seed=3, earlier=noted)
    assert found == expected
    assert [trial.skip_layers for trial in noted] + rest.asked == whole.asked


def test_differences_within_the_clocks_noise_move_nothing():
    class Flat(ScriptedMeter):
        def measure(self, skip_layers):
            self.asked.append(skip_layers)
            return SkipTrial(skip_layers, 2.0, 0.01 / (1 + 2e-3 * (len(self.asked) % 3)))

    found = search_skip_layers(Flat(()), max_trials=500, seed=0)
    assert found.is_settled
    assert len(found.trials) < 40  # the starts, and the neighbours of one of them


@pytest.mark.parametrize("num_layers", [2, 3, 4, 12, 30])
def test_starts_are_choices_a_drafter_takes(num_layers):
    choices = starting_choices(num_layers)
    assert choices
    assert len(set(choices)) == len(choices)
    for choice in choices:
        assert list(choice) == sorted(set(choice))
        assert 0 < len(choice) < num_layers
        assert 0 not in choice


def test_a_target_of_one_layer_is_refused():
    with pytest.raises(ConfigError, match="a target of 1 layers"):
        search_skip_layers(ScriptedMeter((), num_layers=1), max_trials=5, seed=0)


# ---------------------------------------------------------------- measuring


def meter_of(target, prompts, **changes):
    read = lambda group, name: yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())  # noqa: E731
    drafter = parse_settings(SelfSpeculativeSettings, read("drafter", "self_speculative"))
    decode = parse_settings(DecodeSettings, read("decode", "greedy") | changes)
    return SkipMeter(target, drafter, decode, prompts, max_new_tokens=12)


def test_a_choice_is_measured_by_the_decoder_itself():
    target = tiny_target()
    for layer in target.model.model.layers[2:]:  # their residual branches add nothing
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    # a random target also says rows that are no tokens, which no drafter proposes
    padding = {i: -1e4 for i in range(target.spec.num_token_ids, target.spec.vocab_size)}
    meter = meter_of(target, [[3, 4, 5], [7, 8]], ignore_eos=True, logit_bias=padding)
    perfect, worse = meter.measure((2, 3)), meter.measure((0, 1))
    assert perfect.tau > worse.tau
    assert perfect.tau > 3  # all drafts are accepted; the last step of an answer is short
    assert perfect.step_s > 0
    assert perfect.tokens_per_s == pytest.approx(perfect.tau / perfect.step_s)
    assert meter.measure_plain() > 0
    assert meter.build((2, 3)).layers == (0, 1)


def test_nothing_to_measure_on_is_refused():
    target = tiny_target()
    with pytest.raises(ConfigError, match="0 prompts"):
        meter_of(target, [])
    eos = target.spec.eos_ids[0]
    ends_at_once = meter_of(target, [[3]], logit_bias={eos: 1e4})
    with pytest.raises(ConfigError, match="ended with its first token"):
        ends_at_once.measure_plain()


def test_measuring_leaves_the_targets_weights_alone():
    target = tiny_target()
    before = target.view.head_rows(None).clone()
    meter_of(target, [[3, 4]]).measure((1,))
    assert torch.equal(target.view.head_rows(None), before)
