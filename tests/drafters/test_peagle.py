"""P-EAGLE: which rows each depth is trained on, rows that wait for a proposal, what is served."""

import dataclasses
import itertools

import pytest
import torch
from block_kit import expected_laws, parallel_states
from building import REDUCED, build
from eagle_kit import (
    features_of,
    make_batch,
    observe,
    opened,
    propose,
    random_tokens,
    sample_loss,
    samples,
)

from draftlab.randomness import Noise
from draftlab.sampling import Sampling

SAMPLED = Sampling(temperature=1.5)


def test_a_depth_is_trained_on_its_share_of_rows_and_deeper_rows_have_all_above(target):
    drafter = build("peagle", target, depth_keep=0.5, depth_keep_floor=0.2)
    chosen = [(random_tokens(400, seed), 0) for seed in range(2)]
    batch = make_batch(chosen, 400)
    masks, rows, widths = drafter._sample_depths(batch, Noise(0))
    counts = masks.sum((1, 2)).tolist()
    assert counts[0] == 2 * 398
    for k, share in ((1, 0.5), (2, 0.25), (3, 0.2)):
        assert counts[k] == pytest.approx(2 * (398 - k) * share, rel=0.2), k
        assert not (masks[k] & ~masks[k - 1]).any()
        place = rows.place[masks[k].nonzero(as_tuple=True)]
        assert place.min() >= 0
        assert place.max() < widths[k]
    assert widths == sorted(widths, reverse=True)
    again = drafter._sample_depths(batch, Noise(0, epoch=1))[0]
    assert not torch.equal(masks[1], again[1])


def test_sampled_depths_cost_the_same_wherever_a_sample_is_packed(target):
    drafter = build("peagle", target, depth_keep=0.6, depth_keep_floor=0.0)
    chosen = samples()
    packed = make_batch(chosen, 28)
    masks = drafter._sample_depths(packed, Noise(0))[0]
    total = drafter(packed, target.read_features(packed, drafter.needs), Noise(0)).total
    parts = []
    for number, sample in enumerate(chosen):
        ids = sample[0]
        features = features_of(target, drafter, ids)
        b, start = (packed.sample_ids == number).nonzero()[0].tolist()
        found = []
        for t in range(len(ids) - 2):
            states = parallel_states(drafter, features.taps[0, : t + 1], ids[: t + 2], 4)
            found += [(k, t + 2 + k, states[k]) for k in range(4) if masks[k, b, start + t]]
        parts.append(sample_loss(drafter, features, sample, found, 4)[0])
    assert total.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-9)


def test_a_prediction_reads_no_token_after_its_anchor(target):
    """Row t knows token t + 1; token t + 2 is what depth 0 is to say."""
    drafter = build("peagle", target, depth_keep=1.0)
    ids = random_tokens(14, 1)
    batch = make_batch([(ids, 0)], 14)
    features = target.read_features(batch, drafter.needs)
    changed = batch.input_ids.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    taps = features.taps.clone()
    taps[0, 8:] = -taps[0, 8:]
    losses = []
    for tokens, seen in ((batch.input_ids, features.taps), (changed, taps)):
        other = dataclasses.replace(batch, input_ids=tokens)
        _, rows, widths = drafter._sample_depths(other, Noise(0))
        losses.append(drafter._run(other, drafter.fuse_taps(seen), rows, widths))
    for depth, (before, after) in enumerate(zip(*losses, strict=True)):
        same = torch.isclose(before, after).all(-1)[0]
        place = rows.place[0, : 12 - depth]
        assert same[place].tolist() == [t <= 7 for t in range(12 - depth)]


@pytest.mark.parametrize("proposes_between", [False, True])
@pytest.mark.parametrize("cuts", [[1], [3, 4], [6, 14], [14], list(range(1, 16))])
def test_any_chunking_with_or_without_proposals_between_gives_the_same_laws(
    target, cuts, proposes_between
):
    drafter = build("peagle", target)
    text = random_tokens(17, 20)
    state = opened(drafter, target)
    for start, end in itertools.pairwise([0, *cuts, 16]):
        observe(drafter, state, target, [1], [text], [(start, end)])
        if proposes_between:
            propose(drafter, state, [1], 4)
    _, laws = expected_laws(drafter, target, text, 4, temperature=1.5)
    for _ in range(2):
        tree = propose(drafter, state, [1], 4, SAMPLED)
        assert torch.allclose(tree.law_probs[0], laws, atol=1e-9)


def test_rows_of_different_progress_in_one_batch_do_not_mix(target):
    drafter = build("peagle", target)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(20, 2), random_tokens(9, 3)]
    observe(drafter, state, target, [0, 1], texts[:2], [(0, 5), (0, 12)])
    propose(drafter, state, [0, 1], 3)
    observe(drafter, state, target, [0, 1, 2], texts, [(5, 5), (12, 15), (0, 8)])
    tree = propose(drafter, state, [0, 1, 2], 4, SAMPLED)
    for row, text in enumerate((texts[0], texts[1][:16], texts[2])):
        _, laws = expected_laws(drafter, target, text, 4, temperature=1.5)
        assert torch.allclose(tree.law_probs[row], laws, atol=1e-9), row


def test_serving_weights_are_an_eagle3_head_with_what_stands_for_unknown_rows(target):
    drafter = build("peagle", target, REDUCED)
    weights = drafter.serving_weights()
    taps = len(weights.config["tap_layers"])
    assert weights.tensors["mask_hidden"].shape == (taps * 64,)
    assert weights.config["mask_token_id"] == 319
    assert weights.tensors["fc.weight"].shape == (64, taps * 64)
    assert weights.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert weights.tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    assert weights.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert weights.tensors["t2d"].nonzero().flatten().equal(REDUCED)
    assert "lm_head.weight" not in build("peagle", target).serving_weights().tensors
