import pytest

from draftlab.cli.words import read_options, refuse_replaced, split_words
from draftlab.errors import ConfigError


def test_things_and_words_part_in_order():
    things, words = split_words(["RUN", "a.b=1", "My Run (1)", "c=x=y"], most=2)
    assert things == ["RUN", "My Run (1)"]
    assert words == ["a.b=1", "c=x=y"]


def test_a_path_with_an_equals_sign_behind_a_slash_is_a_thing():
    assert split_words(["./a=b"], most=1) == (["./a=b"], [])


def test_one_thing_too_many_is_named():
    with pytest.raises(ConfigError, match="unexpected 'two'; this command takes at most 1"):
        split_words(["one", "two"], most=1)


def test_dashed_options_are_refused():
    with pytest.raises(ConfigError, match="unknown option '--lr'"):
        split_words(["--lr", "3"], most=1)


def test_an_unknown_option_names_the_known_ones():
    with pytest.raises(ConfigError, match="unknown option 'b=2'; known options: a="):
        read_options(["a=1", "b=2"], {"a": "0"})


def test_options_of_a_group_are_named_as_they_are_typed():
    assert read_options(["bench.a=1"], {"a": "0"}, group="bench.") == {"a": "1"}
    with pytest.raises(ConfigError, match=r"option 'bench\.b=2'; known options: bench\.a="):
        read_options(["bench.b=2"], {"a": "0"}, group="bench.")


def test_a_limit_is_let_through_beside_what_has_to_fit_under_it():
    replaced = {"decode.max_new_tokens": "eval.max_new_tokens"}
    words = ["decode=sampled", "decode.max_new_tokens=200"]
    with pytest.raises(ConfigError, match="tokens=200 has no effect on eval; pass"):
        refuse_replaced(words, "eval", replaced)
    refuse_replaced([*words, "decode.min_new_tokens=150"], "eval", replaced)
    refuse_replaced(["eagle.decode.max_new_tokens=200"], "eval", replaced)
