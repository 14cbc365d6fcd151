import pytest
import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._depth_scores import Predictions
from draftlab.drafters._weighing import weigh

DEPTHS, WIDTH, VOCAB = 3, 5, 30


def make():
    """Three sequences in two rows, and states at random."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (2, 14), generator=generator)
    segments = torch.tensor([[0] * 8 + [1] * 6, [0] * 12 + [-1] * 2])
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, :3] = mask[1, 5] = False
    batch = TokenBatch(ids, mask, torch.zeros_like(ids), segments, segments)
    masks = torch.stack([batch.shifted_mask(2 + k) for k in range(DEPTHS)])
    found = Predictions.arrange(batch, masks, lead=2, dtype=torch.float64)
    states = torch.randn(DEPTHS, 2, 14, WIDTH, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    hidden = found.take(list(states), torch.arange(14).expand(2, 14))
    return batch, masks, found, states, hidden, head


def sequences(batch, found):
    return found.batch_rows * 2 + batch.segment_ids[found.batch_rows, found.judges]


def test_d_pace_follows_each_chain_and_adds_up_to_one_a_sequence():
    batch, masks, found, states, hidden, head = make()
    ids = batch.input_ids
    weights = weigh(found, batch, hidden, [head], None, decay=None, normalise="sequence").weights
    expected = torch.zeros_like(weights)
    for n, (b, u) in enumerate(zip(found.batch_rows, found.judges, strict=True)):
        for k in range(DEPTHS):
            t = int(u) - 1 - k
            if not found.counts[k, n]:
                continue
            reached, after = 1.0, 0.0
            for j in range(DEPTHS):
                if not masks[j, b, t]:
                    continue
                q = (head @ states[j, b, t]).softmax(-1)[ids[b, t + 2 + j]].item()
                reached *= 0.5 + 0.5 * q
                after += reached if j >= k else 0.0
            expected[k, n] = after
    sequence = sequences(batch, found)
    for number in sequence.unique().tolist():
        own = sequence == number
        assert weights[:, own].sum().item() == pytest.approx(1.0)
        assert torch.allclose(weights[:, own], expected[:, own] / expected[:, own].sum())


def test_decay_weighs_by_depth_and_a_mean_over_tokens_lets_long_sequences_weigh_more():
    batch, _, found, _, hidden, head = make()
    args = (found, batch, hidden, [head], None)
    mean = weigh(*args, decay=0.5, normalise="sequence").weights
    even = weigh(*args, decay=0.5, normalise="token")
    assert even.averages_tokens
    even = even.weights
    depths = 0.5 ** torch.arange(DEPTHS, dtype=torch.float64).unsqueeze(1)
    assert torch.allclose(even, found.counts * depths)
    sequence = sequences(batch, found)
    totals = {}
    for number in sequence.unique().tolist():
        own = sequence == number
        assert mean[:, own].sum().item() == pytest.approx(1.0)
        totals[number] = even[:, own].sum().item()
    assert totals[2] > totals[0] > 0
