"""DFlash and the network under it: which blocks are trained, what a block reads, what is served."""

import dataclasses

import pytest
import torch
from block_kit import SHAPES, anchors_of, reference_block
from building import REDUCED, build
from eagle_kit import (
    features_of,
    make_batch,
    observe,
    opened,
    propose,
    random_tokens,
    samples,
)

from draftlab.drafters import _spans
from draftlab.drafters._block_backbone import choose_anchors, spread_taps
from draftlab.drafters._unrolling import PickedRows
from draftlab.randomness import Noise


def make(target, vocab_ids=None, **changes):
    return build("dflash", target, vocab_ids, stir=0.1, **changes)


def blocks_of(drafter, batch, features):
    """Run all blocks of a batch; give (batch row, position) -> [S D]."""
    chosen = choose_anchors(batch, Noise(0), None)
    anchors = PickedRows.pick(chosen)
    out = drafter.backbone(batch, features.taps, anchors)
    places = chosen.nonzero().tolist()
    return {(b, t): out[b, anchors.place[b, t]] for b, t in places}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_of_a_packed_batch_equals_that_block_run_alone(target, shape):
    drafter = make(target, **SHAPES[shape])
    chosen = samples()
    batch = make_batch(chosen, 18)
    blocks = blocks_of(drafter, batch, target.read_features(batch, drafter.needs))
    starts = {int(s): (batch.sample_ids == s).nonzero()[0].tolist() for s in range(3)}
    seen = 0
    for number, (ids, learned) in enumerate(chosen):
        taps = features_of(target, drafter, ids).taps[0]
        b, start = starts[number]
        for a in anchors_of(ids, learned):
            expected = reference_block(drafter, taps[:a], ids[a], 4)
            assert torch.allclose(blocks[b, start + a], expected, atol=1e-10), (number, a)
            seen += 1
    assert seen == len(blocks)


@pytest.mark.parametrize("shape", ["two-way", "causal window"])
def test_a_block_reads_nothing_at_or_after_its_anchor_but_the_anchor_itself(target, shape):
    drafter = make(target, **SHAPES[shape])
    ids = random_tokens(12, 1)
    batch = make_batch([(ids, 0)], 12)
    features = target.read_features(batch, drafter.needs)
    taps = features.taps.clone().requires_grad_()
    blocks = blocks_of(drafter, batch, dataclasses.replace(features, taps=taps))
    for a in (3, 7, 10):
        (grad,) = torch.autograd.grad(blocks[0, a].sum(), taps, retain_graph=True)
        used = (grad[0] != 0).flatten(1).any(1)
        first = 0 if drafter.settings.sliding_window is None else max(a - 4, 0)
        assert used.tolist() == [first <= t < a for t in range(12)], a

    # other tokens after the anchor; the same taps, so that nothing comes in by another way
    changed = batch.input_ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    others = blocks_of(drafter, dataclasses.replace(batch, input_ids=changed), features)
    for (b, a), block in blocks.items():
        assert torch.equal(others[b, a], block) == (a <= 7)


def test_blocks_computed_in_pieces_give_the_same_loss_and_gradients(target, monkeypatch):
    drafter = make(target, **SHAPES["window"])
    batch = make_batch(samples(), 18)
    features = target.read_features(batch, drafter.needs)
    results = []
    for rows in (10**6, 5):
        monkeypatch.setattr(_spans, "_PIECE_ROWS", rows)
        drafter.zero_grad()
        loss = drafter(batch, features, Noise(0)).total
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in drafter.parameters())])
    for whole, pieces in zip(*results, strict=True):
        assert torch.allclose(whole, pieces, atol=1e-12)


def test_anchors_are_positions_before_learned_tokens_and_never_a_sample_s_first(target):
    batch = make_batch(samples(), 18)
    found = choose_anchors(batch, Noise(0), None)
    expected = torch.zeros_like(found)
    for number, (ids, learned) in enumerate(samples()):
        b, start = (batch.sample_ids == number).nonzero()[0].tolist()
        expected[b, [start + a for a in anchors_of(ids, learned)]] = True
    assert torch.equal(found, expected)


def test_a_limit_on_anchors_holds_for_each_sample_wherever_it_is_packed():
    packed = make_batch(samples(), 28)
    found = choose_anchors(packed, Noise(0), 3)
    for number, sample in enumerate(samples()):
        alone = make_batch([sample], 28)
        alone.sample_ids[alone.sample_ids == 0] = number
        own = choose_anchors(alone, Noise(0), 3)
        assert own.sum() == 3
        places = (packed.sample_ids == number).nonzero(as_tuple=True)
        assert found[places].tolist() == own[0, : len(sample[0])].tolist()
    assert not torch.equal(found, choose_anchors(packed, Noise(0, epoch=1), 3))
    assert (found <= choose_anchors(packed, Noise(0), None)).all()


def test_features_are_projected_once_and_a_block_leaves_them_alone(target):
    drafter = make(target)
    text = random_tokens(12, 5)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [text], [(0, 6)])
    before = state.memory._kv.data[:, :, 1, :6].clone()
    first = propose(drafter, state, [1], 3)
    assert propose(drafter, state, [1], 3).tokens.equal(first.tokens)
    observe(drafter, state, target, [1], [text], [(6, 9)])
    assert torch.equal(state.memory._kv.data[:, :, 1, :6], before)


def test_default_taps_are_spread_over_the_target():
    assert spread_taps(36) == (2, 10, 18, 26, 34)
    assert spread_taps(30) == (2, 8, 15, 22, 28)
    for count in range(1, 12):
        taps = spread_taps(count)
        assert list(taps) == sorted(set(taps))
        assert 1 <= taps[0] <= taps[-1] <= count


def test_serving_weights_name_what_servers_load_and_hold_nothing_of_the_target(target):
    weights = make(target, REDUCED, num_layers=1).serving_weights()
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    layer |= {f"layers.0.self_attn.{n}_norm.weight" for n in "qk"}
    layer |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {f"layers.0.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")}
    rest = {"fc.weight", "hidden_norm.weight", "norm.weight", "mask_embedding"}
    assert set(weights.tensors) == layer | rest | {"lm_head.weight", "d2t", "t2d"}
    assert weights.tensors["fc.weight"].shape == (64, 64 * len(weights.config["tap_layers"]))
    assert weights.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert weights.config["block_size"] == 4
    assert weights.config["draft_vocab_size"] == len(REDUCED)
    whole = make(target, num_layers=1, mask_token_id=300).serving_weights()
    assert set(whole.tensors) == layer | rest - {"mask_embedding"}
    assert whole.config["mask_token_id"] == 300
