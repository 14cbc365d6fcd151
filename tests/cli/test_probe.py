import pytest
import yaml

from draftlab.cli.probe import AcceptanceProbe
from draftlab.cli.probe_costs import StepCosts, measure_costs
from draftlab.cli.probe_table import (
    describe_probes,
    list_probes,
    warn_of_few_prompts,
    warn_of_rising_loss,
)
from draftlab.decoding.records import Generation, StepRecord
from draftlab.decoding.settings import DecodeSettings
from draftlab.drafters.base import drafter_class
from draftlab.drafters.store import build_drafter
from draftlab.settings.base import parse_settings
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target


def step(accepted, drafted=4, seconds=1.0):
    return StepRecord(drafted, accepted, accepted + 1, (), seconds, 0.0, 0.0, 1)


def settings(group, name, cls, **changes):
    data = yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())
    return parse_settings(cls, {**data, **changes})


class Clock:
    """A decoder whose steps take a second, and half a second more for each draft token."""

    def __init__(self, length):
        self.length = 4 if length is None else length

    def generate(self, prompts, *, max_new_tokens, batch_size):
        steps = tuple(step(1, self.length, 1 + 0.5 * self.length) for _ in range(max_new_tokens))
        return [Generation(i, (1,), (2,), "length", steps, 0.0, 1.0) for i in range(len(prompts))]


def test_costs_are_read_at_the_shortest_and_the_longest_chain():
    assert measure_costs(Clock, [[1], [2], [3]], 4) == StepCosts(4, 1.5, 3.0)
    assert measure_costs(Clock, [[1]], None) == StepCosts(None, 3.0, 3.0)


def test_tokens_per_s_is_that_of_the_best_shorter_chain():
    costs = StepCosts(4, 1.5, 3.0)
    # all accepted: 5 tokens in 3.0 s beat 2 in 1.5; seldom any: one draft token is best
    assert costs.tokens_per_s([step(4)] * 3) == 5 / 3.0
    assert costs.tokens_per_s([step(1), step(0), step(1)]) == (1 + 2 / 3) / 1.5


def test_tau_and_tokens_per_s_may_disagree():
    costs = StepCosts(4, 1.5, 3.0)
    deep, even = [step(4), step(0), step(0)], [step(1), step(1), step(1)]
    assert sum(s.num_emitted for s in deep) > sum(s.num_emitted for s in even)
    assert costs.tokens_per_s(deep) < costs.tokens_per_s(even)


def test_drafts_of_their_own_length_are_taken_as_they_are():
    assert StepCosts(None, 3.0, 3.0).tokens_per_s([step(2), step(0)]) == 2 / 3.0
    assert StepCosts(None, 3.0, 3.0).tokens_per_s([]) == 0.0


METRICS = [
    {"step": 1, "split": "train", "train/loss": 5.0},
    {"step": 2, "split": "validation", "accept/tau": 1.5, "accept/tokens_per_s": 30.0},
    {"step": 2, "split": "train", "train/loss": 3.0},
    {"step": 4, "split": "train", "train/loss": 2.0},
    {"step": 4, "split": "validation", "accept/tau": 1.6, "accept/tokens_per_s": 29.0},
    {"step": 6, "split": "train", "train/loss": 1.0},
    {"step": 6, "split": "validation", "accept/tau": 1.4},
]


def test_a_probes_loss_is_the_mean_since_the_probe_before():
    assert [line.loss for line in list_probes(METRICS)] == [4.0, 2.0, 1.0]


def test_a_line_of_losses_weighs_as_many_steps_as_it_stands_for():
    rows = [
        {"step": 10, "split": "train", "train/loss": 3.0},
        {"step": 11, "split": "train", "train/loss": 14.0},
        {"step": 11, "split": "validation", "accept/tau": 1.5},
        {"step": 20, "split": "train", "train/loss": None},
        {"step": 21, "split": "train", "train/loss": 2.0},
        {"step": 24, "split": "train", "train/loss": 6.0},
        {"step": 24, "split": "validation", "accept/tau": 1.5},
        {"step": 30, "split": "train", "train/loss": None},
        {"step": 30, "split": "validation", "accept/tau": 1.5},
    ]
    assert [line.loss for line in list_probes(rows)] == [4.0, 5.0, None]


def test_the_table_marks_each_columns_best_and_says_that_they_disagree():
    table = describe_probes(list_probes(METRICS), "tau").splitlines()
    assert [line.split() for line in table[1:5]] == [
        ["step", "loss", "tau", "tokens/s"],
        ["2", "4.0000", "1.500", "30.0*"],
        ["4", "2.0000", "1.600*", "29.0"],
        ["6", "1.0000*", "1.400", "-"],
    ]
    assert table[5] == (
        "best loss at step 6, tau at step 4, tokens/s at step 2: they disagree; `best` follows tau, "
        "of equals the last"
    )
    assert "they agree" in describe_probes(list_probes(METRICS[:3]), "tau")


def test_of_equal_probes_the_last_is_marked_as_the_trainer_chooses_it():
    equal = [{"step": step, "split": "validation", "accept/tau": 1.0} for step in (10, 20)]
    assert "best tau at step 20" in describe_probes(list_probes(equal), "tau")


@pytest.mark.parametrize(("count", "warns"), [(0, False), (1, True), (7, True), (8, False)])
def test_a_choice_by_few_prompts_is_warned_of(count, warns):
    warning = warn_of_few_prompts(count, "tau")
    assert (warning is not None) == warns
    if warning is not None:
        assert f"{count} held-out prompt" in warning
        assert "data.validation_fraction" in warning


def test_a_loss_that_ends_far_above_its_beginning_is_warned_of():
    def losses(*values):
        return [{"step": i, "split": "train", "train/loss": x} for i, x in enumerate(values, 1)]

    warning = warn_of_rising_loss(losses(5.0, 1e9, 3.6e36))
    assert warning is not None
    assert "rose from 5 to 3.6e+36 at step 3" in warning
    assert warn_of_rising_loss(METRICS) is None
    assert warn_of_rising_loss(losses(0.1, 0.3)) is None
    assert warn_of_rising_loss([]) is None
    assert warn_of_rising_loss(losses(None, 5.0, 1e9, None)) is not None  # null: no finite number


def test_a_probe_measures_and_counts_ranks_on_the_targets_answers(tmp_path):
    target = tiny_target()
    drafter = build_drafter(
        settings(
            "drafter", "medusa", drafter_class("medusa").settings_class, draft_vocab_size=None
        ),
        target.view,
    )
    decode = settings("decode", "greedy", DecodeSettings)
    costs = tmp_path / "costs.json"
    probe = AcceptanceProbe(target, {"a": [[5, 6, 7], [9, 8]], "b": [[1, 2, 3, 4]]}, decode, costs)
    numbers = probe(1, drafter)
    assert numbers["tau"] >= 1.0
    assert numbers["tokens_per_s"] > 0
    trials = drafter.rank_hits[:, -1].tolist()
    assert trials[0] > 60  # 3 answers of 48 tokens or fewer
    assert trials == sorted(trials, reverse=True)
    drafter.best_tree(6)
    kept = costs.read_text()
    again = probe(2, drafter)
    assert costs.read_text() == kept  # the clock is read once a run
    assert again == numbers
