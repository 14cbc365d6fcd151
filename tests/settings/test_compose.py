import pytest

from draftlab.errors import ConfigError
from draftlab.settings.compose import compose

TARGETS = {
    "tiny": "name: tiny\nlayers: 2\nnote: null\n",
    "big": "name: big\nlayers: 9\nnote: null\n",
}


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """A small conf/ and recipes/ of this test's own."""
    files = {
        "conf/train.yaml": (
            "defaults: [_self_, {target: tiny}, {drafter: ngram}, {paths: default}, "
            "{recipe: null}, {debug: null}]\n"
            "seed: 0\nprompt: null\ninit: null\ndrafters: null\n"
        ),
        "conf/eval.yaml": "defaults: [_self_, train]\nsuite: smoke\n",
        **{f"conf/target/{name}.yaml": text for name, text in TARGETS.items()},
        "conf/drafter/ngram.yaml": "kind: ngram\nmax_ngram: 3\nlr: 1e-4\n",
        "conf/drafter/medusa.yaml": "kind: medusa\nnum_heads: 3\noptions: {}\n",
        "conf/paths/default.yaml": "outputs: outs\ncache: ${paths.outputs}/cache\n",
        "conf/debug/short.yaml": "# @package _global_\nseed: 99\n",
        "recipes/smoke/tiny.yaml": (
            "# @package _global_\n# A test.\n"
            "defaults: [{override /target: big}, {override /drafter: medusa}]\n"
            "seed: 7\ntarget: {layers: 5}\n"
        ),
        "recipes/smoke/typo.yaml": "# @package _global_\ntarget: {layer: 5}\n",
        "recipes/eagle3/big.yaml": "# @package _global_\nseed: 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in ("compose", "locate"):
        monkeypatch.setattr(f"draftlab.settings.{module}.recipes_dir", lambda: tmp_path / "recipes")
    return tmp_path / "conf"


def test_no_words_give_the_yaml_as_it_stands(conf):
    composed = compose("train", [], conf=conf)
    assert composed.data["target"] == {"name": "tiny", "layers": 2, "note": None}
    assert composed.data["seed"] == 0
    assert composed.data["drafter"]["lr"] == 1e-4
    assert composed.choices["target"] == "tiny"
    assert composed.recipe is None
    assert "hydra" not in composed.data


@pytest.mark.parametrize(
    "text",
    [
        "My Data (1).jsonl",
        "a,b.jsonl",
        "What's 2+2?",
        '{"a": 1}',
        "次の文を英語に訳してください。",
        "${oc.env:HOME} \\${x} $",
        'say "hi" \\ back\\',
        "a=b=c",
        "  spaces  ",
        "line one\nline two",
        "# no comment",
        "",
        "@tok!%&*",
        "draftlab_value_7_end",
    ],
)
@pytest.mark.parametrize("key", ["init", "prompt", "target.note"])
def test_any_text_arrives_as_it_was_typed(conf, key, text):
    data = compose("train", [f"{key}={text}"], conf=conf).data
    for part in key.split("."):
        data = data[part]
    assert data == text


def test_a_leading_tilde_is_the_home_folder_in_paths(conf, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    data = compose("train", ["init=~/x.jsonl", "drafters=[~/y,z~/]"], conf=conf).data
    assert data["init"] == "/home/ann/x.jsonl"
    assert data["drafters"] == ["/home/ann/y", "z~/"]


def test_a_prompt_is_a_sentence_and_never_a_path_a_list_or_nothing(conf):
    for text in ("~/x", "[a,b]", "null", "~"):
        assert compose("train", [f"prompt={text}"], conf=conf).data["prompt"] == text


def test_brackets_hold_a_list_of_texts(conf):
    words = ['drafters=[ngram,outputs/My Run (1),"a,b",What\'s 2+2?]']
    data = compose("train", words, conf=conf).data
    assert data["drafters"] == ["ngram", "outputs/My Run (1)", "a,b", "What's 2+2?"]


def test_a_nested_list_is_refused(conf):
    with pytest.raises(ConfigError, match=r"drafters=\[a,\[b\]\]; expected a flat list"):
        compose("train", ["drafters=[a,[b]]"], conf=conf)


def test_null_is_nothing_and_the_last_word_decides(conf):
    assert compose("train", ["init=x", "init=null"], conf=conf).data["init"] is None
    assert compose("train", ["init=null", "init=x"], conf=conf).data["init"] == "x"


def test_interpolation_sees_typed_values(conf):
    data = compose("train", ["paths.outputs=/big disk/runs, all"], conf=conf).data
    assert data["paths"]["cache"] == "/big disk/runs, all/cache"


def test_a_recipe_overrides_choices_and_a_word_overrides_the_recipe(conf):
    composed = compose("train", ["target.layers=6", "recipe=smoke/tiny"], conf=conf)
    assert composed.data["seed"] == 7
    assert composed.data["target"]["name"] == "big"
    assert composed.data["target"]["layers"] == "6"
    assert composed.data["drafter"]["kind"] == "medusa"
    assert composed.recipe == "smoke/tiny"


def test_a_typed_choice_beats_the_recipes(conf):
    composed = compose("train", ["recipe=smoke/tiny", "drafter=ngram"], conf=conf)
    assert composed.data["drafter"]["kind"] == "ngram"
    assert composed.data["target"]["name"] == "big"


def test_debug_beats_the_recipe(conf):
    assert compose("train", ["recipe=smoke/tiny", "debug=short"], conf=conf).data["seed"] == 99


def test_a_recipe_may_be_a_file_anywhere(conf, tmp_path):
    path = tmp_path / "My Recipe (1).yaml"
    path.write_text("# @package _global_\nseed: 42\n")
    composed = compose("train", [f"recipe={path}"], conf=conf)
    assert composed.data["seed"] == 42
    assert composed.recipe == "My_Recipe__1_"


def test_a_primary_may_build_on_another(conf):
    data = compose("eval", ["recipe=smoke/tiny", "target.layers=4"], conf=conf).data
    assert (data["suite"], data["seed"], data["target"]["layers"]) == ("smoke", 7, "4")


def test_an_unknown_recipe_names_the_nearest_three(conf):
    with pytest.raises(ConfigError, match="'smoke/tinny'; nearest: smoke/tiny, smoke/typo, "):
        compose("train", ["recipe=smoke/tinny"], conf=conf)


def test_a_missing_recipe_file_is_named(conf):
    with pytest.raises(ConfigError, match=r"no recipe file nowhere/x\.yaml"):
        compose("train", ["recipe=nowhere/x.yaml"], conf=conf)


def test_a_misspelt_key_is_named_with_near_ones(conf):
    with pytest.raises(
        ConfigError, match=r"unknown key drafter\.max_ngrm; nearest: drafter\.max_n"
    ):
        compose("train", ["drafter.max_ngrm=3"], conf=conf)
    with pytest.raises(ConfigError, match="unknown key sead; nearest: seed"):
        compose("train", ["sead=3"], conf=conf)


def test_a_key_like_no_other_names_the_known_ones_and_no_near_ones(conf):
    with pytest.raises(ConfigError, match=r"unknown key foo; known: .*seed") as caught:
        compose("train", ["foo=bar"], conf=conf)
    assert "nearest" not in str(caught.value)


@pytest.mark.parametrize("key", ["max_ngram", "target.max_ngram"])
def test_a_key_of_another_group_is_found_there(conf, key):
    with pytest.raises(ConfigError, match=rf"unknown key {key}; nearest: drafter\.max_ngram$"):
        compose("train", [f"{key}=3"], conf=conf)


def test_a_key_below_a_plain_value_is_refused(conf):
    with pytest.raises(ConfigError, match=r"unknown key seed\.x; seed has no keys below it"):
        compose("train", ["seed.x=3"], conf=conf)


def test_an_empty_mapping_takes_free_keys_as_yaml(conf):
    words = ["drafter=medusa", "drafter.options.think=false", "drafter.options.name=a b"]
    data = compose("train", words, conf=conf).data
    assert data["drafter"]["options"] == {"think": False, "name": "a b"}


def test_a_whole_group_cannot_be_typed(conf):
    with pytest.raises(ConfigError, match=r"eval\.yaml|cannot be set as a whole"):
        compose("train", ["drafter=medusa", "drafter.options={}"], conf=conf)


def test_an_unknown_choice_names_the_known_ones(conf):
    with pytest.raises(ConfigError, match=r"target=huge; nearest: .*known: big, tiny$"):
        compose("train", ["target=huge"], conf=conf)


def test_a_drafter_may_be_a_run_or_a_hub_id(conf):
    for name in ("outputs/adhoc/20260101-000000-abcd", "someone/eagle3-head"):
        composed = compose("train", [f"drafter={name}"], conf=conf)
        assert composed.data["drafter"] == name
        assert composed.choices["drafter"] == name


def test_an_unknown_drafter_word_is_no_reference(conf):
    with pytest.raises(ConfigError, match="drafter=medussa; nearest: medusa"):
        compose("train", ["drafter=medussa"], conf=conf)


def test_keys_of_a_trained_drafter_cannot_be_set(conf):
    with pytest.raises(ConfigError, match=r"drafter\.max_ngram cannot be set"):
        compose("train", ["drafter=a/b", "drafter.max_ngram=1"], conf=conf)


@pytest.mark.parametrize("word", ["train", "+x=1", "~seed", "seed 3=1", "=3", "hydra/x=3", "--cfg"])
def test_a_word_in_another_style_is_refused(conf, word):
    with pytest.raises(ConfigError, match="expected key=value"):
        compose("train", [word], conf=conf)


def test_sweeps_are_refused(conf):
    with pytest.raises(ConfigError, match="sweeps"):
        compose("train", ["-m", "seed=1"], conf=conf)


def test_broken_yaml_is_named(conf, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml as yaml"):
        compose("train", [f"recipe={path}"], conf=conf)


def test_a_recipe_that_overrides_what_is_not_there_is_a_config_error(conf, tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text("# @package _global_\ndefaults: [{override /colour: red}]\n")
    with pytest.raises(ConfigError, match=r"cannot compose train: .*colour"):
        compose("train", [f"recipe={path}"], conf=conf)


def test_what_a_recipe_leaves_open_is_open_though_it_had_a_value(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("# @package _global_\ninit: ???\noptim:\n  lr: ???\n")
    assert compose("train", [f"recipe={path}"]).data["init"] == "???"
    found = compose("train", [f"recipe={path}", "init=a/b", "optim.lr=1e-3"]).data
    assert (found["init"], found["optim"]["lr"]) == ("a/b", "1e-3")
