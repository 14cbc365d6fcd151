"""DFlash and the network under it, against one block at a time by plain attention."""

import dataclasses
import itertools
import math

import pytest
import torch
from block_kit import (
    REDUCED,
    SHAPES,
    anchors_of,
    build,
    reference_block,
    settings,
    support_of,
)
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
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling
from draftlab.targets.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def blocks_of(drafter, batch, features):
    """Run all blocks of a batch; give (batch row, position) -> [S D]."""
    chosen = choose_anchors(batch, Noise(0), None)
    anchors = PickedRows.pick(chosen)
    out = drafter.backbone(batch, features.taps, anchors)
    places = chosen.nonzero().tolist()
    return {(b, t): out[b, anchors.place[b, t]] for b, t in places}


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("shape", SHAPES)
def test_every_block_of_a_packed_batch_equals_that_block_run_alone(target, shape):
    drafter = build("dflash", target, **SHAPES[shape])
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
    drafter = build("dflash", target, **SHAPES[shape])
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


def reference_loss(target, drafter, sample):
    """Loss of a sample, block by block and token by token."""
    ids, learned = sample
    depths, decay = drafter.settings.block_size - 1, drafter.settings.step_decay
    features = features_of(target, drafter, ids)
    total, weight, counts = 0.0, 0.0, [0] * depths
    losses, hits, overlaps = ([0.0] * depths for _ in range(3))
    for a in anchors_of(ids, learned):
        block = reference_block(drafter, features.taps[0, :a], ids[a], depths + 1)
        for k in range(depths):
            token = a + 1 + k
            if token >= len(ids) or token < learned:
                continue
            scores = score_rows(
                objective(drafter.settings.objective),
                target.view.head(features.final[:, token - 1]),
                (block[k + 1] @ drafter._head.rows.T).unsqueeze(0),
                torch.tensor([ids[token]]),
                None if drafter.vocab is None else drafter.vocab.ids,
            )
            total, weight = total + decay**k * scores.loss[0], weight + decay**k
            if drafter.vocab is not None and (token - 1) % 8:
                continue  # a reduced vocabulary is judged at every eighth position
            losses[k] += scores.loss.item()
            hits[k] += int(scores.hit)
            overlaps[k] += scores.overlap.item()
            counts[k] += 1
    return total / weight, losses, hits, overlaps, counts


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("loss", ["cross_entropy", "forward_kl"])
def test_the_loss_is_the_mean_over_blocks_of_a_sequence_and_so_are_its_gradients(
    target, vocab_ids, loss
):
    drafter = build("dflash", target, vocab_ids, objective=loss)
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    got = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = [reference_loss(target, drafter, sample) for sample in chosen]
    total = sum(part[0] for part in parts)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-9)
    assert (got.count >= 3).all()
    for i, sums in enumerate((got.loss_sum, got.hit_sum, got.overlap_sum, got.count), start=1):
        assert torch.allclose(sums, torch.tensor([part[i] for part in parts]).double().sum(0))
    got.total.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    total.backward()
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, atol=1e-9), name


def test_d_pace_weighs_a_token_by_the_chance_that_it_or_a_later_one_is_reached(target):
    drafter = build("dflash", target, position_weights="d_pace", step_decay=None)
    ids, learned = random_tokens(10, 4), 3
    batch = make_batch([(ids, learned)], 10)
    features = target.read_features(batch, drafter.needs)
    got = drafter(batch, features, Noise(0)).total.item()
    total, weight = 0.0, 0.0
    for a in anchors_of(ids, learned):
        block = reference_block(drafter, features.taps[0, :a], ids[a], 4)
        labels = ids[a + 1 : a + 4]
        laws = [(block[k + 1] @ drafter._head.rows.T).softmax(-1) for k in range(len(labels))]
        chances = [law[label].item() for law, label in zip(laws, labels, strict=True)]
        reached = torch.tensor([0.5 + 0.5 * q for q in chances]).double().cumprod(0)
        for k, chance in enumerate(chances):
            total -= reached[k:].sum() * math.log(chance)
            weight += reached[k:].sum()
    assert got == pytest.approx((total / weight).item(), rel=1e-6)


def test_blocks_computed_in_pieces_give_the_same_loss_and_gradients(target, monkeypatch):
    drafter = build("dflash", target, **SHAPES["window"])
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


def test_training_on_a_few_answers_lowers_the_loss_and_raises_acceptance(target):
    drafter = build("dflash", target, num_layers=1)
    batch = make_batch([(random_tokens(20, seed), 4) for seed in range(4)], 40)
    features = target.read_features(batch, drafter.needs)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = drafter(batch, features, Noise(0))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss)
    assert losses[-1].total < 0.2 * losses[0].total


def test_nothing_to_learn_gives_zero_and_a_gradient_for_every_parameter(target):
    drafter = build("dflash", target)
    batch = make_batch([(random_tokens(6, 1), 6)], 6)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert loss.total.item() == 0
    assert loss.count.sum() == 0
    assert all(p.grad is not None for p in drafter.parameters())


# ---------------------------------------------------------------- decoding


def expected_laws(drafter, target, text, depth, temperature=1.0):
    """Laws of the tokens after a text whose last token is the anchor."""
    taps = features_of(target, drafter, text[:-1]).taps[0]
    slots = drafter.settings.block_size
    block = reference_block(drafter, taps, text[-1], slots)[1 : depth + 1]
    ids = support_of(drafter)
    logits = block @ drafter._head.rows[: len(ids)].T
    return ids, (logits / temperature).softmax(-1)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("shape", SHAPES)
def test_proposals_are_what_training_ran_and_their_laws_are_reported(target, shape, vocab_ids):
    drafter = build("dflash", target, vocab_ids, **SHAPES[shape])
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    greedy = propose(drafter, state, [0, 2], 3)
    drawn = propose(drafter, state, [0, 2], 3, Sampling(temperature=0.7))
    uniforms = torch.rand(2, 3, generator=torch.Generator().manual_seed(7))
    for row, text in enumerate((texts[1], texts[0])):
        ids, laws = expected_laws(drafter, target, text, 3)
        assert greedy.tokens[row].tolist() == ids[laws.argmax(-1)].tolist()
        ids, laws = expected_laws(drafter, target, text, 3, temperature=0.7)
        assert torch.allclose(drawn.law_probs[row], laws, atol=1e-9)
        columns = (laws.cumsum(-1) > uniforms[row].unsqueeze(1)).int().argmax(-1)
        assert drawn.tokens[row].tolist() == ids[columns].tolist()


@pytest.mark.parametrize("shape", ["two-way", "causal"])
def test_a_token_s_law_does_not_depend_on_how_many_are_asked_for(target, shape):
    drafter = build("dflash", target, **SHAPES[shape])
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 3)], [(0, 8)])
    long = propose(drafter, state, [0], 3, Sampling(temperature=1.0))
    short = propose(drafter, state, [0], 1, Sampling(temperature=1.0))
    assert torch.allclose(short.law_probs, long.law_probs[:, :1], atol=1e-12)


def test_features_are_projected_once_and_a_block_leaves_them_alone(target):
    drafter = build("dflash", target)
    text = random_tokens(12, 5)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [text], [(0, 6)])
    before = state.memory._kv.data[:, :, 1, :6].clone()
    first = propose(drafter, state, [1], 3)
    assert propose(drafter, state, [1], 3).tokens.equal(first.tokens)
    observe(drafter, state, target, [1], [text], [(6, 9)])
    assert torch.equal(state.memory._kv.data[:, :, 1, :6], before)


@pytest.mark.parametrize("cuts", [[1], [3, 4], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_any_chunking_of_observations_gives_the_same_proposal(target, cuts):
    drafter = build("dflash", target, **SHAPES["window"])
    text = random_tokens(10, 20)
    whole, parts = opened(drafter, target), opened(drafter, target)
    observe(drafter, whole, target, [1], [text], [(0, 9)])
    for start, end in itertools.pairwise([0, *cuts, 9]):
        observe(drafter, parts, target, [1], [text], [(start, end)])
    trees = [propose(drafter, s, [1], 3, Sampling(temperature=1.0)) for s in (whole, parts)]
    assert torch.allclose(trees[0].law_probs, trees[1].law_probs, atol=1e-10)


def test_rows_that_observe_nothing_keep_their_anchor(target):
    drafter = build("dflash", target)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(9, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 5), (0, 7)])
    before = propose(drafter, state, [0], 3).tokens
    observe(drafter, state, target, [0, 1], texts, [(5, 5), (7, 8)])
    assert propose(drafter, state, [0], 3).tokens.equal(before)


def test_a_row_near_its_capacity_drafts_only_what_fits_and_harms_no_other(target):
    drafter = build("dflash", target)
    state = opened(drafter, target, slots=2, capacity=12)
    texts = [random_tokens(11, 1), random_tokens(5, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 10), (0, 4)])
    tree = propose(drafter, state, [0, 1], 3)
    assert tree.num_nodes.tolist() == [1, 3]
    for row, text in enumerate(texts):
        ids, laws = expected_laws(drafter, target, text, 3)
        assert tree.tokens[row].tolist() == ids[laws.argmax(-1)].tolist()


def test_a_closed_slot_starts_anew(target):
    drafter = build("dflash", target)
    state = opened(drafter, target)
    texts = [random_tokens(9, 1), random_tokens(6, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 8), (0, 5)])
    drafter.close(state, torch.tensor([0]))
    assert propose(drafter, state, [0, 1], 3).num_nodes.tolist() == [0, 3]
    observe(drafter, state, target, [0], [texts[1]], [(0, 5)])
    tree = propose(drafter, state, [0, 1], 3)
    assert tree.tokens[0].equal(tree.tokens[1])


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0)], ids=["greedy", "sampled"])
def test_a_tree_s_nodes_have_the_law_of_their_slot(target, sampling):
    drafter = build("dflash", target, REDUCED)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    shape = StaticTree(parents=(-1, -1, 0, 0, 1), ranks=(0, 1, 0, 1, 0))
    tree = propose(drafter, state, [0], 2, sampling, tree=shape)
    assert tree.num_nodes.tolist() == [5]
    ids, laws = expected_laws(drafter, target, text, 2)
    best = ids[laws.argsort(-1, descending=True)]
    if sampling.is_greedy:
        levels = [best[0, 0], best[0, 1], best[1, 0], best[1, 1], best[1, 0]]
        assert tree.tokens[0].tolist() == [int(t) for t in levels]
    else:
        for node, level in ((0, 0), (2, 1), (4, 1)):  # first children, nothing taken out yet
            assert torch.allclose(tree.law_probs[0, node], laws[level], atol=1e-9)


def test_a_dynamic_tree_keeps_the_likeliest_paths(target):
    drafter = build("dflash", target)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    tree = propose(drafter, state, [0], 3, tree=DynamicTree(num_nodes=6, top_k=3, depth=3))
    ids, laws = expected_laws(drafter, target, text, 3)
    best = [law.topk(3) for law in laws]
    products = sorted(
        (
            torch.stack([best[d].values[r] for d, r in enumerate(path)]).prod().item()
            for depth in (1, 2, 3)
            for path in itertools.product(range(3), repeat=depth)
        ),
        reverse=True,
    )
    found = []
    for node in range(6):
        chance, at = 1.0, node
        while at >= 0:
            depth, up = 0, int(tree.parents[0, at])
            while up >= 0:
                depth, up = depth + 1, int(tree.parents[0, up])
            chance *= laws[depth][ids == tree.tokens[0, at]].item()
            at = int(tree.parents[0, at])
        found.append(chance)
    assert sorted(found, reverse=True) == pytest.approx(products[:6])


def test_confidence_is_told_when_asked_for_and_is_the_law_s_largest_probability(target):
    drafter = build("dflash", target)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    sampling = Sampling(temperature=2.0)
    assert propose(drafter, state, [0], 3, sampling).confidence is None
    tree = propose(drafter, state, [0], 3, sampling, min_confidence=0.1)
    assert torch.allclose(tree.confidence, tree.law_probs.max(-1).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_works_in_narrow_dtypes(target, dtype):
    exact, drafter = build("dflash", target, REDUCED), build("dflash", target, REDUCED).to(dtype)
    text = random_tokens(9, 4)
    laws = []
    for head in (exact, drafter):
        state = opened(head, target)
        observe(head, state, target, [0], [text], [(0, 8)])
        laws.append(propose(head, state, [0], 3, Sampling(temperature=30.0)).law_probs)
    assert torch.allclose(laws[0].float(), laws[1].float(), atol=0.01)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "mistral", "gpt2", "gpt_oss"])
def test_every_family_trains_and_drafts(family):
    other = tiny_target(family)
    drafter = build("dflash", other, num_layers=1)
    batch = make_batch(samples(), 18)
    loss = drafter(batch, other.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert torch.isfinite(loss.total)
    state = opened(drafter, other)
    observe(drafter, state, other, [0], [random_tokens(9, 4)], [(0, 8)])
    assert propose(drafter, state, [0], 3).num_nodes.tolist() == [3]


# ---------------------------------------------------------------- construction, serving


def test_default_taps_are_spread_over_the_target():
    assert spread_taps(36) == (2, 10, 18, 26, 34)
    assert spread_taps(30) == (2, 8, 15, 22, 28)
    for count in range(1, 12):
        taps = spread_taps(count)
        assert list(taps) == sorted(set(taps))
        assert 1 <= taps[0] <= taps[-1] <= count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "kl"}, r"objective='kl'.*forward_kl"),
        ({"tap_layers": []}, r"tap_layers=\[\]"),
        ({"num_draft_tokens": 4}, r"num_draft_tokens=4.*at most 3"),
        ({"sliding_window": 3}, r"sliding_window=3 is below block_size=4"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings("dflash", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tap_layers": [2, 9]}, r"tap_layers=\[2, 9\]"),
        ({"mask_token_id": 320}, r"mask_token_id=320: expected an id in 0..319"),
        ({"mask_token_id": 256}, r"mask_token_id=256.*no end token"),
    ],
)
def test_what_the_target_does_not_have_is_refused(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        build("dflash", target, **changes)


def test_more_draft_tokens_than_a_block_has_are_refused(target):
    drafter = build("dflash", target)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(6, 1)], [(0, 5)])
    with pytest.raises(ConfigError, match=r"4 draft tokens in a row.*at most 3"):
        propose(drafter, state, [0], 4)


def test_serving_weights_name_what_servers_load_and_hold_nothing_of_the_target(target):
    weights = build("dflash", target, REDUCED, num_layers=1).serving_weights()
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
    whole = build("dflash", target, num_layers=1, mask_token_id=300).serving_weights()
    assert set(whole.tensors) == layer | rest - {"mask_embedding"}
    assert whole.config["mask_token_id"] == 300
