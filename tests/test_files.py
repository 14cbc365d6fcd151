import errno

import pytest

from draftlab.files import find_disk_error, naming_refusals, write_whole


def refuse(error):
    def write(temporary):
        temporary.write_text("half")
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, error):
    path = tmp_path / "model.safetensors"
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, refuse(error))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_another_kind_stays_as_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError):
        write_whole(tmp_path / "x", refuse(ZeroDivisionError()))
    assert find_disk_error(ValueError("28")) is None


def test_the_named_error_is_of_its_numbers_class(tmp_path):
    with (
        pytest.raises(PermissionError) as caught,
        naming_refusals(tmp_path),
    ):
        raise PermissionError(errno.EACCES, "Permission denied", "inside")
    assert caught.value.filename == str(tmp_path)
