"""The demo's plan: its stages fit into the time given, and more time never buys less."""

import itertools

import pytest

from draftlab.cli.plan import Rates, apply_to_eval, plan_stages
from draftlab.cli.schema import RunSettings, settings_of
from draftlab.settings.compose import compose

SLOW = Rates(single=12.0, batched=60.0, answering=90.0)
USUAL = Rates(single=60.0, batched=250.0, answering=400.0)
FAST = Rates(single=300.0, batched=4000.0, answering=12000.0)
MACHINES = pytest.mark.parametrize("rates", [SLOW, USUAL, FAST], ids=["slow", "usual", "fast"])
NUM_PROMPTS = 2304


def planned(minutes, rates, spent_s=25.0):
    return plan_stages(60.0 * minutes, spent_s, rates, NUM_PROMPTS)


def seconds(plan):
    return plan.spent_s + 2 * plan.eval_s + plan.answer_s + plan.train_s


@MACHINES
@pytest.mark.parametrize("minutes", [4, 12, 45])
def test_all_stages_fit_into_the_time_given(minutes, rates):
    plan = planned(minutes, rates)
    assert seconds(plan) <= plan.total_s
    assert plan.train_s >= 20
    assert 12 <= plan.num_prompts <= NUM_PROMPTS


@MACHINES
def test_the_first_report_comes_within_three_minutes(rates):
    plan = planned(12, rates)
    assert plan.spent_s + plan.eval_s <= 180


@MACHINES
def test_more_time_never_buys_less(rates):
    plans = [planned(minutes, rates) for minutes in (4, 12, 45)]
    for less, more in itertools.pairwise(plans):
        assert more.train_s >= less.train_s
        assert more.num_prompts * more.answers_per_prompt >= (
            less.num_prompts * less.answers_per_prompt
        )
        assert more.prompts_per_domain >= less.prompts_per_domain
        assert more.max_new_tokens >= less.max_new_tokens


@pytest.mark.parametrize("minutes", [4, 12, 45])
def test_a_faster_machine_answers_and_measures_more(minutes):
    plans = [planned(minutes, rates) for rates in (SLOW, USUAL, FAST)]
    measured = [p.prompts_per_domain * p.max_new_tokens for p in plans]
    answered = [p.num_prompts * p.answers_per_prompt for p in plans]
    assert measured == sorted(measured)
    assert answered == sorted(answered)


def test_the_plan_is_told_and_becomes_settings():
    plan = planned(12, USUAL)
    assert plan.describe().startswith("plan for 12 minutes:\n")
    settings = settings_of(RunSettings, compose("train", ["eval=domains"])).eval
    changed = apply_to_eval(plan, settings)
    assert changed.prompts_per_domain == plan.prompts_per_domain
    assert changed.suite == settings.suite


def test_answers_are_shortened_before_prompts_are_left_out():
    plans = [planned(minutes, USUAL) for minutes in (4, 12, 45)]
    assert [plan.answer_tokens for plan in plans] == sorted(plan.answer_tokens for plan in plans)
    short = planned(12, SLOW)
    assert short.answer_tokens < planned(45, FAST).answer_tokens
    for plan in [*plans, short]:
        assert plan.num_prompts == NUM_PROMPTS or plan.answer_tokens <= 64
        assert plan.num_prompts >= 384 or plan.answer_tokens == 48
