from draftlab.settings.locate import checkout_dir, conf_dir, recipe_names, recipes_dir


def test_a_checkout_uses_the_folders_beside_the_package():
    root = checkout_dir()
    assert root is not None
    assert conf_dir() == root / "conf"
    assert recipes_dir() == root / "recipes"


def test_recipes_are_named_by_their_path_without_the_ending(tmp_path):
    for name in ("b/two.yaml", "a/one.yaml", "a/deep/three.yaml", "a/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("seed: 1\n")
    assert recipe_names(tmp_path) == ["a/deep/three", "a/one", "b/two"]
