import pytest
import torch

from draftlab.data.chat import encode_chat
from draftlab.data.packing import PackedRow, Sample, collate


@pytest.fixture
def batch(tokenizer_of, chats_of):
    """x1 and x2 packed into one row, x3 padded in another."""
    samples = []
    for number, chat in enumerate(chats_of("multi_turn_mask.jsonl").values()):
        row = encode_chat(tokenizer_of("tok_chatml"), chat).rows[0]
        samples.append(Sample(number, "d", torch.tensor(row.ids), torch.tensor(row.mask)))
    return collate([PackedRow(tuple(samples[:2])), PackedRow((samples[2],))])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_prediction_counts_exactly_when_the_token_predicted_is_an_answers(batch, depth):
    rows, length = batch.input_ids.shape
    for b in range(rows):
        for t in range(length):
            ahead = t + depth
            counts = (
                ahead < length
                and batch.sample_ids[b, t] == batch.sample_ids[b, ahead] >= 0
                and bool(batch.loss_mask[b, ahead])
            )
            assert bool(batch.shifted_mask(depth)[b, t]) == counts
            if counts:
                assert batch.shifted_ids(depth)[b, t] == batch.input_ids[b, ahead]


def test_the_last_prompt_token_predicts_the_answers_first(batch):
    # ids of "assistant\n" end at the last prompt token; the next id is the answer's first
    starts = [
        (b, t)
        for b in range(2)
        for t in range(1, batch.input_ids.shape[1])
        if batch.loss_mask[b, t] and not batch.loss_mask[b, t - 1]
    ]
    assert len(starts) == 5  # three answers of x1, one of x2, one of x3
    assert all(batch.shifted_mask(1)[b, t - 1] for b, t in starts)


def test_sequences_are_counted_by_what_they_have_to_learn(batch):
    assert batch.num_sequences == 3
