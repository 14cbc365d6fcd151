import pytest
import torch

from draftlab.errors import CheckpointError
from draftlab.training.checkpoints import CheckpointFolder, Progress, read_state, write_state


def progress(step: int) -> Progress:
    limit = {"spent_s": 0.1 + step, "counted_s": (0.1, 0.2), "looks": ((3, 90), (7, 95))}
    return Progress(step, 0, step, 100, None, None, **limit)


def commit(folder: CheckpointFolder, step: int, is_best: bool = False):
    def write(place):
        write_state(place, progress(step), {"weight/w": torch.tensor([float(step)])})

    return folder.commit(step, write, is_best=is_best)


def test_what_is_written_is_read_back(tmp_path):
    place = commit(CheckpointFolder(tmp_path), 500)
    assert place.name == "step-000500"
    found, tensors = read_state(place)
    assert found == progress(500)
    assert torch.equal(tensors["weight/w"], torch.tensor([500.0]))


def test_a_checkpoint_that_failed_half_way_is_never_pointed_to(tmp_path):
    folder = CheckpointFolder(tmp_path)
    first = commit(folder, 1)

    def fail(place):
        (place / "drafter.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.commit(2, fail, is_best=True)
    assert folder.latest() == first
    assert folder.best() is None
    assert not (tmp_path / "step-000002").exists()


def test_a_checkpoint_that_was_not_named_yet_is_written_again(tmp_path):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 1)
    commit(folder, 2)
    (tmp_path / "latest").write_text("step-000001")
    commit(folder, 2)
    assert folder.latest() == tmp_path / "step-000002"


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (5, 10, 15, 20):
        commit(folder, step, is_best=step == 5)
        folder.rotate(2)
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-000005", "step-000015", "step-000020"]
    assert folder.best() == tmp_path / "step-000005"


def test_rotation_clears_what_a_dead_process_left(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for name in (".writing-step-000009", ".dropping-step-000003"):
        (tmp_path / name / "state").mkdir(parents=True)
    commit(folder, 1)
    folder.rotate(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001"]


def test_a_pointer_to_nothing_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "latest").write_text("step-000007")
    with pytest.raises(CheckpointError, match="step-000007, which does not exist"):
        CheckpointFolder(tmp_path).latest()


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no training state"):
        read_state(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1}', '{"looks": [1]}'])
def test_a_damaged_progress_is_refused(tmp_path, text):
    place = commit(CheckpointFolder(tmp_path), 1)
    (place / "state" / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="no training state"):
        read_state(place)


def test_a_damaged_state_is_refused(tmp_path):
    place = commit(CheckpointFolder(tmp_path), 1)
    (place / "state" / "tensors.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="no training state"):
        read_state(place)


def test_the_best_is_named_again_after_a_death_between_checkpoint_and_name(tmp_path):
    folder = CheckpointFolder(tmp_path)
    commit(folder, 1, is_best=True)
    commit(folder, 2)
    folder.name_best(2)
    assert folder.best() == tmp_path / "step-000002"
    folder.name_best(3)
    assert folder.best() == tmp_path / "step-000002"
