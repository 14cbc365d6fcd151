"""The list of seeded bugs stays true while the code changes; `make mutants` runs it."""

from pathlib import Path

import pytest

import draftlab
from proofs.mutants.catalogue import MUTANTS

PACKAGE = Path(draftlab.__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seeded_bug_replaces_text_that_stands_once_in_its_file(mutant):
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_seeded_bug_exist(mutant):
    named = [argument for argument in mutant.tests if argument.startswith("tests/")]
    assert named
    for argument in named:
        file, _, name = argument.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in source


def test_there_are_many_and_each_is_named_once():
    assert len(MUTANTS) >= 24
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_readme_has_a_place_for_their_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- mutants: written by `make mutants` -->") == 1
    assert text.count("<!-- /mutants -->") == 1
