"""Which families a bench goes through, and which words reach which."""

import pytest

from draftlab.cli.families import common_words, compose_families, known_families, share
from draftlab.errors import ConfigError


def test_every_kind_with_a_recipe_for_the_demo_target_is_a_family():
    known = known_families()
    assert known["draft_model"] == "distill/smollm2-demo"
    assert {"eagle", "eagle3", "medusa", "hydra", "dflash", "dspark", "peagle", "mtp"} <= set(known)


def test_families_come_in_the_order_asked_with_their_recipes():
    families = compose_families(["families=[medusa,distill]"])
    assert [(f.name, f.recipe) for f in families] == [
        ("medusa", "medusa/smollm2-demo"),
        ("draft_model", "distill/smollm2-demo"),
    ]
    assert families[0].settings.target.source == "demo"
    assert families[0].settings.drafter.draft_vocab_size == 8192


def test_another_target_takes_kinds_without_their_recipes():
    (family,) = compose_families(["families=medusa", "target=tiny"])
    assert family.recipe is None
    assert family.settings.drafter.draft_vocab_size is None
    assert family.settings.target.source == "tiny"
    assert family.settings.data.answers == "target"


def test_presets_beat_recipes_and_words_beat_presets():
    words = ["families=[medusa]", "train.batch_rows=3"]
    presets = ["train.max_minutes=2", "train.batch_rows=7", "eval=brief"]
    (family,) = compose_families(words, presets=presets)
    assert family.settings.train.max_minutes == 2
    assert family.settings.train.batch_rows == 3
    assert family.settings.eval.suite == "brief"


def test_a_word_with_a_familys_name_goes_to_that_one_alone():
    words = ["families=[medusa,eagle]", "medusa.optim.lr=0.5", "optim.weight_decay=0.2"]
    medusa, eagle = compose_families(words)
    assert medusa.settings.optim.lr == 0.5
    assert eagle.settings.optim.lr != 0.5
    assert medusa.settings.optim.weight_decay == eagle.settings.optim.weight_decay == 0.2
    assert common_words(words) == ["optim.weight_decay=0.2"]


def test_the_first_familys_data_are_everyones_and_what_gave_way_is_told():
    words = ["families=[medusa,eagle]", "eagle.data.max_tokens=100", "eagle.optim.lr=0.5"]
    shared, said = share(compose_families(words), ("data", "seed"))
    assert [f.settings.data.max_tokens for f in shared] == [384, 384]
    assert shared[1].settings.optim.lr == 0.5
    assert said == ["eagle: data as medusa has it (max_tokens=384, not 100)"]


def test_other_settings_make_another_key():
    (one,), (same,), (other,) = (
        compose_families(["families=medusa", f"optim.lr={lr}"]) for lr in (0.1, 0.1, 0.2)
    )
    assert one.key == same.key != other.key
    assert one.key.startswith("medusa-")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("families=[medusa,eagel]", "expected different ones of .*near: eagle"),
        ("families=[medusa,medusa]", "expected different ones"),
        ("families=[]", "expected different ones"),
        ("recipe=smoke/tiny", "cannot go to all families"),
        ("drafter=medusa", "cannot go to all families"),
        ("drafter.num_heads=1", "unknown key drafter.num_heads"),
    ],
)
def test_words_that_fit_no_family_are_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        compose_families(["families=[eagle]", word])
