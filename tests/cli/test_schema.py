import pytest

from draftlab.cli.schema import EvalCommandSettings, RunSettings, flat_keys, settings_of
from draftlab.errors import ConfigError
from draftlab.settings.base import parse_settings
from draftlab.settings.compose import compose


def settings(*words):
    return settings_of(RunSettings, compose("train", words))


def test_typed_text_becomes_what_the_settings_ask_for():
    found = settings("optim.lr=5e-5", "train.max_steps=null", "train.max_minutes=3", "seed=7")
    assert (found.optim.lr, found.train.max_steps, found.seed) == (5e-5, None, 7)


def test_the_drafter_has_the_settings_of_its_kind():
    found = settings("drafter=ngram", "drafter.max_ngram=4")
    assert type(found.drafter).__name__ == "NgramSettings"
    assert found.model_dump(mode="json")["drafter"]["max_ngram"] == 4


def test_settings_survive_the_way_through_plain_data():
    found = settings("drafter=ngram", "data=jsonl", "data.paths=[a,b]")
    assert parse_settings(RunSettings, found.model_dump(mode="json")) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_ngrm": 3}, r"unknown key drafter\.max_ngrm=3; did you mean max_ngram"),
        ({"kind": "ngramm"}, r"unknown drafter kind 'ngramm'; known kinds: .*ngram"),
        ({"max_ngram": "many"}, r"drafter\.max_ngram='many'"),
    ],
)
def test_a_wrong_drafter_key_names_the_keys_of_its_kind(change, message):
    composed = compose("train", ["drafter=ngram"])
    composed.data["drafter"].update(change)
    with pytest.raises(ConfigError, match=message):
        settings_of(RunSettings, composed)


def test_a_typo_in_a_recipe_is_named_with_its_cure(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\ntrain: {max_step: 3}\noptim: {lr: fast}\n")
    with pytest.raises(ConfigError) as caught:
        settings(f"recipe={path}")
    assert "unknown key train.max_step=3; did you mean max_steps" in str(caught.value)
    assert "optim.lr='fast'" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["regenerate.top_p=2", "regenerate.temperature=1"], r"regenerate\.top_p=2\.0: expected"),
        (["regenerate.top_k=3"], r"regenerate\.top_k=3 cannot take effect.*above 0, or null"),
        (["decode.temperature=-1"], r"decode\.temperature=-1\.0: expected"),
        (["drafter=eagle3", "drafter.objective=tvv"], r"drafter\.objective='tvv': expected"),
        (["eval.draft_lengths=[0]"], r"eval\.draft_lengths\[0\]='0': expected greater than 0"),
        (["max_steps=3"], r"unknown key max_steps; nearest: train\.max_steps$"),
    ],
)
def test_what_is_wrong_is_named_with_its_group(words, message):
    with pytest.raises(ConfigError, match=rf"^{message}"):
        settings(*words)


def test_a_key_left_open_is_asked_for():
    with pytest.raises(ConfigError, match=r"pass target\.name=VALUE"):
        settings("target=local")


def test_evaluation_takes_several_drafters_by_name():
    composed = compose("eval", ["drafters=[ngram,outputs/My Run (1)]"])
    assert settings_of(EvalCommandSettings, composed).drafters == ("ngram", "outputs/My Run (1)")


def test_evaluation_takes_a_trained_drafter_by_name():
    found = settings_of(EvalCommandSettings, compose("eval", ["drafter=someone/eagle3-head"]))
    assert found.drafter == "someone/eagle3-head"


def test_nested_keys_become_dotted_ones():
    data = {"a": {"b": 1, "c": {"d": None}}, "e": {}}
    assert flat_keys(data) == {"a.b": 1, "a.c.d": None, "e": {}}
