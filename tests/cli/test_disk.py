import errno

import pytest

from draftlab.cli.disk import describe_bytes, explain_refusal, free_bytes, require_writable
from draftlab.errors import ConfigError


def test_a_folder_that_is_not_there_yet_can_be_written_and_is_not_made(tmp_path):
    require_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    assert free_bytes(tmp_path / "a" / "b") > 0


@pytest.mark.parametrize("below", ["", "runs/mine"])
def test_a_file_is_no_folder(tmp_path, below):
    file = tmp_path / "notes.txt"
    file.write_text("")
    with pytest.raises(ConfigError, match=r"notes\.txt is no folder; pass paths\.outputs=FOLDER"):
        require_writable(file / below)


def test_what_the_system_refuses_is_said(tmp_path, monkeypatch):
    def refuse(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("draftlab.cli.disk.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match=r"read-only file system \(.*\); pass out=FOLDER"):
        require_writable(tmp_path / "x", "pass out=FOLDER")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/a"),
            "cannot use /runs/a: no space left on device; free some space there, then give the "
            "same command",
        ),
        (
            RuntimeError("Error while serializing: No space left on device (os error 28)"),
            "cannot use a file: no space left on device; free some space there, then give the "
            "same command",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/runs/a"), "choose a place that can be"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/runs/a"), None),
        (ZeroDivisionError("28"), None),
    ],
)
def test_a_refusal_is_a_sentence_and_other_errors_are_not(error, said):
    found = explain_refusal(error)
    assert found is None if said is None else said in str(found)


def test_bytes_are_written_for_people():
    assert [describe_bytes(n) for n in (None, 2**20, 3 * 2**30)] == ["unknown", "1 MiB", "3.0 GiB"]
