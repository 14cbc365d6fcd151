import pytest
import torch
from safetensors.torch import save_file
from toy_training import ROW_TOKENS, make_samples

from draftlab.data.packing import Sample, pack
from draftlab.errors import DataError
from draftlab.targets.features import FeatureRequest
from draftlab.targets.tiny import tiny_target
from draftlab.training.rows import TrainingRows


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def captured(target, tmp_path_factory):
    """Three samples in two rows, with taps 1, 3, 4 and the final hidden state on disk."""
    path = tmp_path_factory.mktemp("features") / "shard.safetensors"
    samples = make_samples(target, [5, 9, 12])
    request = FeatureRequest((1, 3, 4), wants_final=True)
    taps, final, offsets = [], [], [0]
    for sample in samples:
        rows = TrainingRows(pack([sample], ROW_TOKENS), captured=None)
        found = rows.features([0], rows.tokens([0]), request, target)
        taps.append(found.taps[0, : len(sample)])
        final.append(found.final[0, : len(sample)])
        offsets.append(offsets[-1] + len(sample))
    save_file(
        {"taps": torch.cat(taps), "final": torch.cat(final), "offsets": torch.tensor(offsets)},
        path,
    )
    return [
        Sample(s.sample_id, s.domain, s.ids, s.mask, path, slot) for slot, s in enumerate(samples)
    ]


@pytest.mark.parametrize("taps", [(1, 3, 4), (1, 4), (3,), ()])
def test_captured_features_are_those_the_target_would_compute(target, captured, taps):
    packed = pack(captured, ROW_TOKENS)
    assert len(packed) == 2
    needs = FeatureRequest(taps, wants_final=True)
    stored = TrainingRows(packed, captured=FeatureRequest((1, 3, 4), wants_final=True))
    online = TrainingRows(packed, captured=None)
    batch = stored.tokens([1, 0])
    found = stored.features([1, 0], batch, needs, target)
    expected = online.features([1, 0], batch, needs, target)
    used = batch.segment_ids >= 0
    assert torch.allclose(found.final[used], expected.final[used])
    assert (found.taps is None) == (not taps)
    if taps:
        assert torch.allclose(found.taps[used], expected.taps[used])


def test_an_empty_row_is_padding_and_its_features_are_zeros(target, captured):
    rows = TrainingRows(
        pack(captured, ROW_TOKENS), captured=FeatureRequest((1, 3, 4), wants_final=True)
    )
    batch = rows.tokens([0, None])
    assert not batch.loss_mask[1].any()
    assert (batch.segment_ids[1] == -1).all()
    found = rows.features([0, None], batch, FeatureRequest((3,), wants_final=False), target)
    assert found.final is None
    assert found.taps.shape[:3] == (2, batch.input_ids.shape[1], 1)
    assert not found.taps[1].any()


def test_captured_features_that_lack_a_tap_are_refused(captured):
    rows = TrainingRows(pack(captured, ROW_TOKENS), captured=FeatureRequest((1, 3)))
    rows.check_captured(FeatureRequest((3,)))
    with pytest.raises(DataError, match=r"taps \[1, 3\] and no final.*needs taps \[2\]"):
        rows.check_captured(FeatureRequest((2,), wants_final=True))


def test_rows_without_a_token_to_learn_are_refused(target):
    samples = make_samples(target, [0, 0])
    with pytest.raises(DataError, match="no token to learn in 1 rows"):
        TrainingRows(pack(samples, ROW_TOKENS), captured=None)


def test_sequences_count_only_when_they_have_something_to_learn(target):
    samples = [*make_samples(target, [3, 0]), *make_samples(target, [30], first_id=2)]
    rows = TrainingRows(pack(samples, ROW_TOKENS), captured=None)
    assert sorted(rows.num_sequences) == [1, 1]


def test_the_checksum_sees_ids_masks_and_packing(target):
    samples = make_samples(target, [5, 9])

    def checksum(samples, length=ROW_TOKENS):
        return TrainingRows(pack(samples, length), captured=None).checksum()

    base = checksum(samples)
    assert checksum(make_samples(target, [5, 9])) == base
    changed = samples[0].ids.clone()
    changed[0] += 1
    first = samples[0]
    assert checksum([Sample(0, "toy", changed, first.mask), samples[1]]) != base
    assert checksum([Sample(0, "toy", first.ids, ~first.mask), samples[1]]) != base
    assert checksum(samples, length=30) != base


def test_batches_are_as_wide_as_needed_and_no_wider(target):
    rows = TrainingRows(pack(make_samples(target, [5, 110]), 256), captured=None)
    widths = [rows.tokens([row]).input_ids.shape[1] for row in range(len(rows))]
    assert widths == [192]
    assert rows.tokens([None]).input_ids.shape == (1, 64)
