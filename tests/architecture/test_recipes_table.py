from draftlab.cli.recipes import markdown_table
from draftlab.settings.locate import recipes_dir


def test_the_table_of_the_readme_is_the_one_the_command_prints():
    text = (recipes_dir() / "README.md").read_text(encoding="utf-8")
    assert text.endswith("\n\n" + markdown_table()), "run: draftlab recipes --markdown"
