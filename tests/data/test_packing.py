import pytest
import torch

from draftlab.data.packing import PackedRow, Sample, collate, collate_features, cut_samples, pack
from draftlab.errors import DataError


def sample(sample_id, length, learned_from=1):
    mask = torch.arange(length) >= learned_from
    return Sample(sample_id, "d", torch.arange(length) + 10 * sample_id, mask)


def test_packing_keeps_every_sample_whole_and_within_the_row():
    lengths = [5, 9, 3, 3, 7, 2, 8, 1, 4, 6]
    rows = pack([sample(i, n) for i, n in enumerate(lengths)], 10)
    packed = sorted(s.sample_id for row in rows for s in row.samples)
    assert packed == list(range(len(lengths)))
    assert all(row.num_tokens <= 10 for row in rows)
    assert len(rows) == 5  # 48 tokens cannot need fewer


def test_packing_does_not_depend_on_the_order_given():
    samples = [sample(i, 1 + (7 * i) % 9) for i in range(20)]
    ids = [[s.sample_id for s in row.samples] for row in pack(samples, 16)]
    assert ids == [[s.sample_id for s in row.samples] for row in pack(samples[::-1], 16)]


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(DataError, match=r"sample 3 has 11 tokens but a row holds\s+10"):
        pack([sample(3, 11)], 10)


def test_a_cut_slices_ids_and_mask_and_counts():
    whole = sample(0, 12, learned_from=6)
    result = cut_samples([whole, sample(1, 4)], 8)
    assert (result.num_cut, result.lost) == (1, [])
    assert torch.equal(result.samples[0].ids, whole.ids[:8])
    assert torch.equal(result.samples[0].mask, whole.mask[:8])


def test_a_sample_whose_answer_is_cut_away_is_lost_and_told():
    result = cut_samples([sample(0, 12, learned_from=8), sample(1, 4)], 8)
    assert [s.sample_id for s in result.lost] == [0]
    assert [s.sample_id for s in result.samples] == [1]
    assert result.num_cut == 1


def test_collating_marks_padding_by_length_and_restarts_positions():
    batch = collate([PackedRow((sample(0, 3), sample(1, 2))), PackedRow((sample(2, 4),))])
    assert batch.input_ids.tolist() == [[0, 1, 2, 10, 11], [20, 21, 22, 23, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    assert batch.sample_ids.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, -1]]
    assert batch.loss_mask.tolist() == [
        [False, True, True, False, True],
        [False, True, True, True, False],
    ]


def test_a_batch_can_be_laid_out_longer_but_not_shorter():
    rows = [PackedRow((sample(0, 3),))]
    assert collate(rows, 6).input_ids.shape == (1, 6)
    with pytest.raises(DataError, match="a row of 3 tokens"):
        collate(rows, 2)


def test_a_sample_without_features_says_so():
    with pytest.raises(DataError, match="sample 5 has no captured features"):
        collate_features([PackedRow((sample(5, 3),))])
