"""P-EAGLE against a slow reference: true rows and mask rows as one causal sequence."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import yaml
from block_kit import REDUCED, support_of
from eagle_kit import (
    features_of,
    make_batch,
    observe,
    opened,
    propose,
    random_tokens,
    reference_pass,
    samples,
)

from draftlab.drafters.peagle import PEagle, PEagleSettings
from draftlab.drafters.tree import StaticTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.objectives.named import objective
from draftlab.objectives.rows import score_rows
from draftlab.randomness import Noise
from draftlab.sampling import Sampling
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

YAML = Path(__file__).parents[2] / "conf" / "drafter" / "peagle.yaml"
SMALL = {"num_layers": 2, "num_depths": 4, "num_draft_tokens": 4}
SAMPLED = Sampling(temperature=1.5)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    return parse_settings(
        PEagleSettings, yaml.safe_load(YAML.read_text(encoding="utf-8")) | SMALL | changes
    )


def build(target, vocab_ids=None, seed=0, **changes):
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, target.spec.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PEagle(settings(**changes), target.view, vocab=vocab)


def reference_states(drafter, taps, tokens, depths):
    """What the LM head reads at every depth after the true rows of `taps` [n L D].

    Args:
        tokens: of the positions and one more, the anchor.
    """
    embed = drafter.target.embed
    unknown = embed(torch.tensor([drafter.mask_token_id])).expand(depths - 1, -1)
    learned = drafter.fuse_taps(drafter.mask_hidden.view(-1, 64)).expand(depths - 1, -1)
    embedded = torch.cat([embed(torch.tensor(tokens[1:])), unknown])
    out = reference_pass(drafter, embedded, torch.cat([drafter.fuse_taps(taps), learned]))
    return drafter.norm(out[len(tokens) - 2 :])


VARIANTS = {
    "default": {},
    "one layer": {"num_layers": 1},
    "3.0": {"fc_norm": False},
    "residual after the norm": {"norm_before_residual": True, "mask_token_id": 300},
}


# ---------------------------------------------------------------- training


def reference_loss(target, drafter, sample, keeps):
    """Loss of one sample by running the decode-time pass at every position.

    Args:
        keeps: (depth, position) -> is it trained?
    """
    ids, learned = sample
    depths, decay = drafter.settings.num_depths, drafter.settings.step_decay
    features = features_of(target, drafter, ids)
    total, weight, counts = 0.0, 0.0, [0] * depths
    for t in range(len(ids) - 1):
        states = reference_states(drafter, features.taps[0, : t + 1], ids[: t + 2], depths)
        for k in range(depths):
            token = t + 2 + k
            if token >= len(ids) or token < learned or not keeps(k, t):
                continue
            scores = score_rows(
                objective(drafter.settings.objective),
                target.view.head(features.final[:, token - 1]),
                (states[k] @ drafter._head.rows.T).unsqueeze(0),
                torch.tensor([ids[token]]),
                None if drafter.vocab is None else drafter.vocab.ids,
            )
            total, weight = total + decay**k * scores.loss[0], weight + decay**k
            counts[k] += int(drafter.vocab is None or (token - 1) % 8 == 0)
    return total / weight, counts


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_depths_trained_everywhere_equal_running_the_decode_time_pass(
    target, variant, vocab_ids
):
    drafter = build(target, vocab_ids, depth_keep=1.0, step_decay=0.7, **VARIANTS[variant])
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    got = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = [reference_loss(target, drafter, sample, lambda k, t: True) for sample in chosen]
    total = sum(part[0] for part in parts)
    assert got.total.item() == pytest.approx(total.item(), rel=1e-9)
    assert torch.equal(got.count, torch.tensor([part[1] for part in parts]).double().sum(0))
    got.total.backward()
    grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    total.backward()
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(grads[name], parameter.grad, atol=1e-9), name


def test_a_depth_is_trained_on_its_share_of_rows_and_deeper_rows_have_all_above(target):
    drafter = build(target, depth_keep=0.5, depth_keep_floor=0.2)
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
    drafter = build(target, depth_keep=0.6, depth_keep_floor=0.0)
    chosen = samples()
    packed = make_batch(chosen, 28)
    masks = drafter._sample_depths(packed, Noise(0))[0]
    total = drafter(packed, target.read_features(packed, drafter.needs), Noise(0)).total
    parts = []
    for number, sample in enumerate(chosen):
        b, start = (packed.sample_ids == number).nonzero()[0].tolist()
        keeps = masks[:, b, start : start + len(sample[0])]
        parts.append(reference_loss(target, drafter, sample, lambda k, t, m=keeps: bool(m[k, t])))
    assert total.item() == pytest.approx(sum(part[0].item() for part in parts), rel=1e-9)


def test_a_prediction_reads_no_token_after_its_anchor(target):
    """Row t knows token t + 1; token t + 2 is what depth 0 is to say."""
    drafter = build(target, depth_keep=1.0)
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


def test_training_on_a_few_answers_lowers_the_loss_and_raises_acceptance(target):
    drafter = build(target, num_layers=1)
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
    assert losses[-1].total < 0.5 * losses[0].total
    assert losses[-1].overlap_sum.sum() > losses[0].overlap_sum.sum() + 10


def test_nothing_to_learn_gives_zero_and_a_gradient_for_every_parameter(target):
    drafter = build(target)
    batch = make_batch([(random_tokens(6, 1), 6)], 6)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert loss.total.item() == 0
    assert all(p.grad is not None for p in drafter.parameters())


# ---------------------------------------------------------------- decoding


def expected_laws(drafter, target, text, depth, temperature=1.0):
    taps = features_of(target, drafter, text[:-1]).taps[0]
    ids = support_of(drafter)
    logits = reference_states(drafter, taps, text, depth) @ drafter._head.rows[: len(ids)].T
    return ids, (logits / temperature).softmax(-1)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_proposals_are_what_training_ran_and_their_laws_are_reported(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, **VARIANTS[variant])
    texts = [random_tokens(13, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 12), (0, 4)])
    greedy = propose(drafter, state, [0, 2], 4)
    drawn = propose(drafter, state, [0, 2], 4, SAMPLED)
    uniforms = torch.rand(2, 4, generator=torch.Generator().manual_seed(7))
    assert drawn.num_nodes.tolist() == [4, 4]
    for row, text in enumerate((texts[1], texts[0])):
        ids, laws = expected_laws(drafter, target, text, 4)
        assert greedy.tokens[row].tolist() == ids[laws.argmax(-1)].tolist()
        ids, laws = expected_laws(drafter, target, text, 4, temperature=1.5)
        assert torch.allclose(drawn.law_probs[row], laws, atol=1e-9)
        columns = (laws.cumsum(-1) > uniforms[row].unsqueeze(1)).int().argmax(-1)
        assert drawn.tokens[row].tolist() == ids[columns].tolist()


@pytest.mark.parametrize("proposes_between", [False, True])
@pytest.mark.parametrize("cuts", [[1], [3, 4], [6, 14], [14], list(range(1, 16))])
def test_any_chunking_with_or_without_proposals_between_gives_the_same_laws(
    target, cuts, proposes_between
):
    drafter = build(target)
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


def test_a_token_s_law_does_not_depend_on_how_many_are_asked_for(target):
    drafter = build(target)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(9, 3)], [(0, 8)])
    long, short = (propose(drafter, state, [0], depth, SAMPLED) for depth in (4, 1))
    assert torch.allclose(short.law_probs, long.law_probs[:, :1], atol=1e-12)


def test_rows_of_different_progress_in_one_batch_do_not_mix(target):
    drafter = build(target)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(20, 2), random_tokens(9, 3)]
    observe(drafter, state, target, [0, 1], texts[:2], [(0, 5), (0, 12)])
    propose(drafter, state, [0, 1], 3)
    observe(drafter, state, target, [0, 1, 2], texts, [(5, 5), (12, 15), (0, 8)])
    tree = propose(drafter, state, [0, 1, 2], 4, SAMPLED)
    for row, text in enumerate((texts[0], texts[1][:16], texts[2])):
        _, laws = expected_laws(drafter, target, text, 4, temperature=1.5)
        assert torch.allclose(tree.law_probs[row], laws, atol=1e-9), row


def test_a_row_near_its_capacity_drafts_only_what_fits_and_harms_no_other(target):
    drafter = build(target)
    state = opened(drafter, target, slots=2, capacity=12)
    texts = [random_tokens(11, 1), random_tokens(5, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 10), (0, 4)])
    tree = propose(drafter, state, [0, 1], 4)
    assert tree.num_nodes.tolist() == [1, 4]
    for row, text in enumerate(texts):
        ids, laws = expected_laws(drafter, target, text, 4)
        assert tree.tokens[row].tolist() == ids[laws.argmax(-1)].tolist()


def test_a_closed_slot_starts_anew(target):
    drafter = build(target)
    state = opened(drafter, target)
    texts = [random_tokens(9, 1), random_tokens(6, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 8), (0, 5)])
    drafter.close(state, torch.tensor([0]))
    assert propose(drafter, state, [0, 1], 3).num_nodes.tolist() == [0, 3]
    observe(drafter, state, target, [0], [texts[1]], [(0, 5)])
    tree = propose(drafter, state, [0, 1], 3)
    assert tree.tokens[0].equal(tree.tokens[1])


def test_a_tree_s_nodes_have_the_law_of_their_depth(target):
    drafter = build(target)
    state = opened(drafter, target)
    text = random_tokens(9, 3)
    observe(drafter, state, target, [0], [text], [(0, 8)])
    shape = StaticTree(parents=(-1, -1, 0, 1), ranks=(0, 1, 0, 0))
    tree = propose(drafter, state, [0], 2, tree=shape)
    ids, laws = expected_laws(drafter, target, text, 2)
    best = ids[laws.argsort(-1, descending=True)]
    expected = [best[0, 0], best[0, 1], best[1, 0], best[1, 0]]
    assert tree.tokens[0].tolist() == [int(t) for t in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_works_in_narrow_dtypes(target, dtype):
    exact, drafter = build(target, REDUCED), build(target, REDUCED).to(dtype)
    laws = []
    for head in (exact, drafter):
        state = opened(head, target)
        observe(head, state, target, [0], [random_tokens(9, 4)], [(0, 8)])
        laws.append(propose(head, state, [0], 4, Sampling(temperature=30.0)).law_probs)
    assert torch.allclose(laws[0].float(), laws[1].float(), atol=0.01)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "gpt_oss"])
def test_other_families_train_and_draft(family):
    other = tiny_target(family)
    drafter = build(other, num_layers=1)
    batch = make_batch(samples(), 18)
    loss = drafter(batch, other.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert torch.isfinite(loss.total)
    state = opened(drafter, other)
    observe(drafter, state, other, [0], [random_tokens(9, 4)], [(0, 8)])
    assert propose(drafter, state, [0], 3).num_nodes.tolist() == [3]


# ---------------------------------------------------------------- construction, serving


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "kl"}, r"objective='kl'.*forward_kl"),
        ({"tap_layers": []}, r"tap_layers=\[\]"),
        ({"num_depths": 3}, r"num_draft_tokens=4 is more than num_depths=3"),
        ({"depth_keep": 0.0}, "depth_keep"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


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
        build(target, **changes)


def test_serving_weights_are_an_eagle3_head_with_what_stands_for_unknown_rows(target):
    drafter = build(target, REDUCED)
    weights = drafter.serving_weights()
    taps = len(weights.config["tap_layers"])
    assert weights.tensors["mask_hidden"].shape == (taps * 64,)
    assert weights.config["mask_token_id"] == 319
    assert weights.tensors["fc.weight"].shape == (64, taps * 64)
    assert weights.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert weights.tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    assert weights.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert weights.tensors["t2d"].nonzero().flatten().equal(REDUCED)
    assert "lm_head.weight" not in build(target).serving_weights().tensors
