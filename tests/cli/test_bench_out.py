import pytest

from draftlab.cli.bench_out import find_out
from draftlab.errors import ConfigError


def test_without_a_word_the_default_is_taken_and_not_made_yet(tmp_path):
    default = tmp_path / "bench" / "x.json"
    assert find_out("", default) == default
    assert not default.parent.exists()


def test_a_file_in_a_folder_that_is_there_is_taken(tmp_path):
    assert find_out(f"{tmp_path}/mine.json", tmp_path / "x.json") == tmp_path / "mine.json"


@pytest.mark.parametrize(
    ("name", "message"),
    [("none/such/x.json", "which is no folder here; make it first"), ("", "is a folder; pass")],
)
def test_a_place_that_cannot_take_the_file_is_refused_and_left_as_it_is(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        find_out(f"{tmp_path}/{name}", tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []
