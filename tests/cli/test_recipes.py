import pytest
import yaml

from draftlab.cli import recipes
from draftlab.cli.main import main

RECIPE = (
    "# @package _global_\n# Shows that all works.\n"
    "defaults:\n  - override /drafter: ngram\n"
    "about: {paper: null, needs: a laptop, hours: null, tau: 1.25}\nseed: 5\n"
)


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    (folder / "smoke").mkdir(parents=True)
    (folder / "smoke/tiny.yaml").write_text(RECIPE)
    for module in ("settings.locate", "settings.compose", "cli.recipes"):
        monkeypatch.setattr(f"draftlab.{module}.recipes_dir", lambda: folder)
    return folder


def test_the_list_gives_name_and_sentence(shipped, capsys):
    assert main(["recipes"]) == 0
    assert "smoke/tiny  Shows that all works." in capsys.readouterr().out


def test_one_recipe_is_shown_composed_and_resolved(shipped, capsys):
    assert main(["recipes", "smoke/tiny", "seed=6"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["drafter"]["kind"] == "ngram"
    assert shown["seed"] == "6"
    assert shown["paths"]["cache"] == "outputs/cache"


def test_a_value_that_is_none_is_refused_and_open_keys_stay_open(capsys):
    assert main(["recipes", "smoke/tiny", "optim.lr=abc"]) == 2
    assert "optim.lr='abc'" in capsys.readouterr().err
    assert main(["recipes", "company/finetune", "optim.lr=1e-4"]) == 0
    assert "???" in capsys.readouterr().out


def test_a_copy_can_be_edited_and_is_not_overwritten(shipped, tmp_path, capsys):
    mine = str(tmp_path / "my own")
    assert main(["recipes", "copy", "smoke/tiny", mine]) == 0
    assert f"draftlab train 'recipe={mine}/tiny.yaml'" in capsys.readouterr().out
    assert (tmp_path / "my own/tiny.yaml").read_text() == RECIPE
    assert main(["recipes", "copy", "smoke/tiny", mine]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_an_unknown_recipe_is_code_2_with_the_nearest(shipped, capsys):
    assert main(["recipes", "smoke/tinny"]) == 2
    assert "nearest: smoke/tiny" in capsys.readouterr().err


def test_the_table_has_one_row_a_recipe(shipped):
    rows = recipes.markdown_table().splitlines()
    assert rows[2:] == ["| `smoke/tiny` | Shows that all works | a laptop | - | 1.25 |"]
