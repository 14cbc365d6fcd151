import pytest
import torch

from draftlab.data.batch import TokenBatch
from draftlab.errors import ConfigError, TargetMismatch
from draftlab.targets.features import FeatureRequest
from draftlab.targets.target import build_target
from draftlab.targets.tiny import build_tiny_model, tiny_target, tiny_tokenizer

REQUEST = FeatureRequest((1, 4), wants_final=True)


def packed(*rows, length):
    """Rows of samples, each a tensor of ids."""
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.long)
    positions, segments = torch.zeros_like(ids), torch.full(shape, -1)
    for row, samples in enumerate(rows):
        place = 0
        for number, sample in enumerate(samples):
            where = slice(place, place + len(sample))
            ids[row, where] = sample
            positions[row, where] = torch.arange(len(sample))
            segments[row, where] = number
            place += len(sample)
    return TokenBatch(ids, segments >= 0, positions, segments, segments)


def test_packed_samples_do_not_see_each_other(target, tolerance, random_ids):
    a, b, c = random_ids(13, seed=1), random_ids(9, seed=2), random_ids(17, seed=3)
    together = target.read_features(packed([a, b], [c], length=24), REQUEST)
    for row, start, sample in ((0, 0, a), (0, 13, b), (1, 0, c)):
        alone = target.read_features(packed([sample], length=len(sample)), REQUEST)
        where = slice(start, start + len(sample))
        for name in ("taps", "final"):
            found, expected = getattr(together, name)[row, where], getattr(alone, name)[0]
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_a_sample_that_saw_its_neighbour_would_be_seen(targets, random_ids):
    target = targets("llama")
    a, b = random_ids(13, seed=1), random_ids(9, seed=2)
    apart = target.read_features(packed([a, b], length=22), REQUEST)
    joined = target.read_features(packed([torch.cat([a, b])], length=22), REQUEST)
    assert (apart.final - joined.final)[0, 13:].abs().max() > 1e-3
    assert torch.allclose(apart.final[0, :13], joined.final[0, :13])


def test_training_features_equal_decoding_features(target, tolerance, random_ids, run_chain):
    text = random_ids(15)
    trained = target.read_features(packed([text], length=20), REQUEST)
    kv = target.open_kv(1, 24)
    for first in range(0, 15, 5):
        found = run_chain(target, kv, [text], [first], 5, request=REQUEST).features
        where = slice(first, first + 5)
        torch.testing.assert_close(found.taps, trained.taps[:, where], rtol=0, atol=tolerance)
        torch.testing.assert_close(found.final, trained.final[:, where], rtol=0, atol=tolerance)


def test_training_features_are_fit_for_autograd(targets, random_ids):
    features = targets("llama").read_features(packed([random_ids(6)], length=8), REQUEST)
    weight = torch.ones(64, dtype=torch.float64, requires_grad=True)
    (features.final * weight).sum().backward()
    assert weight.grad is not None
    assert not features.final.requires_grad
    assert torch.isfinite(features.taps).all()


def test_the_target_is_frozen_and_in_eval_mode():
    model = build_tiny_model("llama", num_hidden_layers=2).train()
    target = build_target(model, tiny_tokenizer(), name="x", source="tiny")
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("taps", [(0, 2), (1, 5), (2, 1), (2, 2)])
def test_taps_out_of_range_or_order_are_refused_with_the_range(targets, random_ids, taps):
    batch = packed([random_ids(4)], length=4)
    with pytest.raises(ConfigError, match=r"1\.\.4"):
        targets("llama").read_features(batch, FeatureRequest(taps))


def test_tokenizer_ids_beyond_the_rows_are_refused_with_id_and_row_count():
    model = build_tiny_model("llama", vocab_size=260)
    with pytest.raises(TargetMismatch, match=r"id 260, .* 260 rows"):
        build_target(model, tiny_tokenizer(), name="x", source="tiny")


def test_rows_beyond_the_tokenizer_are_counted_as_padding(targets):
    spec = targets("llama").spec
    assert (spec.num_token_ids, spec.vocab_size) == (261, 320)


def test_the_identity_card_is_complete(targets):
    spec = targets("gpt2").spec
    assert (spec.num_layers, spec.hidden_size, spec.max_positions) == (4, 64, 512)
    assert spec.eos_ids == (targets("gpt2").tokenizer.eos_token_id,)
    assert spec.dtype == "float64"


def test_plain_forward_equals_a_run_and_leaves_the_target_usable(targets, random_ids, run_chain):
    target = targets("qwen3")
    text = random_ids(7)
    plain = target.forward_plainly(text.unsqueeze(0)).logits
    ours = run_chain(target, target.open_kv(1, 8), [text], [0], 7).logits
    torch.testing.assert_close(plain, ours, rtol=0, atol=1e-9)


def test_another_door_takes_over_and_is_reported(random_ids):
    class Recorder:
        name = "recorder"
        calls = 0

        def forward(self, kv, step, request, wants_logits):
            self.calls += 1
            return target.reference.forward(kv, step, request, wants_logits)

    target, door = tiny_target("llama", num_hidden_layers=2), Recorder()
    target.use_door(door)
    target.read_features(packed([random_ids(4)], length=4), FeatureRequest((1,)))
    assert door.calls == 1
    assert target.report["kernels"] == "recorder"
