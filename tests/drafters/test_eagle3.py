"""The head against a slow reference: one causal pass over everything a draft row may see."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import yaml
from eagle_kit import (
    drafter_ids,
    expected_chain,
    features_of,
    make_batch,
    observe,
    opened,
    paths_of,
    propose,
    random_tokens,
    reference_chain,
    reference_pass,
    replayed_laws,
    samples,
)

from draftlab.drafters.eagle3 import Eagle3, Eagle3Settings, default_taps
from draftlab.drafters.store import build_drafter
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.drafters.vocab import DraftVocab
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling, SamplingRows
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

YAML = Path(__file__).parents[2] / "conf" / "drafter" / "eagle3.yaml"
REDUCED = torch.tensor([i for i in range(261) if i % 3 or i == 256])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(**changes):
    return parse_settings(Eagle3Settings, {**yaml.safe_load(YAML.read_text()), **changes})


def build(target, vocab_ids=None, seed=0, **changes):
    vocab = None if vocab_ids is None else DraftVocab(vocab_ids, target.spec.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Eagle3(settings(**changes), target.view, vocab=vocab)


def reference_loss(target, drafter, one_sample):
    """Loss of one sample by running the decode-time chain at every position, token by token."""
    ids, learned = one_sample
    steps, decay = drafter.settings.unroll_steps, drafter.settings.step_decay
    features = features_of(target, drafter, ids)
    allowed = drafter_ids(drafter)
    total, weight = 0.0, 0.0
    losses, hits, overlaps, counts = ([0.0] * steps for _ in range(4))
    for t in range(len(ids)):
        depths = [s for s in range(steps) if t + 2 + s < len(ids) and t + 2 + s >= learned]
        if not depths:
            continue
        chain = reference_chain(drafter, features, ids, t, max(depths) + 1)
        for s in depths:
            p = target.view.head(features.final[0, t + 1 + s]).softmax(-1)
            q = chain[s].softmax(-1)
            kept = p[allowed] / p[allowed].sum()
            loss = (kept * (kept / q).log()).sum()
            if ids[t + 2 + s] not in allowed:
                loss = 0 * loss
            total, weight = total + decay**s * loss, weight + decay**s
            if drafter.vocab is not None and (t + 1 + s) % 8:
                continue  # a reduced vocabulary is judged at every eighth position
            losses[s] += loss.item()
            hits[s] += int(allowed[q.argmax()] == p.argmax())
            overlaps[s] += torch.minimum(p[allowed], q).sum().item()
            counts[s] += 1
    return total / weight, losses, hits, overlaps, counts


VARIANTS = {
    "default": {},
    "two layers": {"num_layers": 2},
    "3.0": {"fc_norm": False, "norm_output": False, "train_head": True},
    "residual after the norm": {
        "norm_before_residual": True,
        "fc_norm": False,
        "norm_before_fc": True,
    },
    "one step": {"unroll_steps": 1},
}


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_unrolled_loss_equals_running_the_decode_time_chain_everywhere(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, **VARIANTS[variant])
    chosen = [*samples(), (random_tokens(18, 4), 3)]
    batch = make_batch(chosen, 18)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = [reference_loss(target, drafter, sample) for sample in chosen]
    assert loss.total.item() == pytest.approx(sum(part[0].item() for part in parts), rel=1e-9)
    assert (loss.count >= 3).all()
    for i, got in enumerate((loss.loss_sum, loss.hit_sum, loss.overlap_sum, loss.count), start=1):
        assert torch.allclose(got, torch.tensor([part[i] for part in parts]).double().sum(0))


@pytest.mark.parametrize("variant", ["default", "two layers", "3.0"])
def test_gradients_flow_through_all_depths_as_in_the_reference(target, variant):
    drafter = build(target, REDUCED, **VARIANTS[variant])
    batch = make_batch(samples(), 18)
    drafter(batch, target.read_features(batch, drafter.needs), Noise(0)).total.backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    sum(reference_loss(target, drafter, sample)[0] for sample in samples()).backward()
    for name, parameter in drafter.named_parameters():
        assert torch.allclose(got[name], parameter.grad, atol=1e-10), name


def test_a_prediction_counts_exactly_when_the_token_predicted_is_learned(target):
    """Case O-06: alternate learned and other tokens; the first answer token after a prompt counts."""
    drafter = build(target, unroll_steps=4)
    ids = random_tokens(16, 5)
    batch = make_batch([(ids, 0)], 16)
    learned = [3, 4, 5, 9, 10, 15]
    batch.loss_mask[:] = False
    batch.loss_mask[0, learned] = True
    features = target.read_features(batch, drafter.needs)
    loss = drafter(batch, features, Noise(0))
    expected = [sum(u - 2 - s >= 0 for u in learned) for s in range(4)]
    assert loss.count.tolist() == expected

    # which rows' laws matter: change the target's law at one position and see who notices
    for u in range(1, 16):
        final = features.final.clone()
        final[0, u - 1] = -final[0, u - 1]  # judges token u
        changed = drafter(batch, dataclasses.replace(features, final=final), Noise(0))
        noticed = (changed.loss_sum - loss.loss_sum).abs() > 1e-9
        assert noticed.tolist() == [u in learned and u - 2 - s >= 0 for s in range(4)], u


def test_samples_packed_together_do_not_see_each_other(target):
    drafter = build(target)
    packed = make_batch(samples(), 28)
    alone = [make_batch([sample], 12) for sample in samples()]
    total = drafter(packed, target.read_features(packed, drafter.needs), Noise(0)).total
    parts = [drafter(b, target.read_features(b, drafter.needs), Noise(0)).total for b in alone]
    assert torch.allclose(total, sum(parts), rtol=1e-10)


def test_nothing_to_learn_gives_zero_and_a_gradient_for_every_parameter(target):
    drafter = build(target, train_head=True)
    batch = make_batch([(random_tokens(6, 1), 6)], 6)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert loss.total.item() == 0
    assert loss.count.sum() == 0
    assert all(p.grad is not None for p in drafter.parameters())


def test_training_on_a_few_answers_lowers_the_loss_and_raises_acceptance(target):
    drafter = build(target, unroll_steps=2)
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
    assert (losses[-1].overlap_sum > losses[0].overlap_sum + 5).all()


def test_tap_noise_is_on_in_training_only_and_repeats_with_its_key(target):
    drafter = build(target, tap_noise=0.5)
    batch = make_batch(samples(), 18)
    features = target.read_features(batch, drafter.needs)
    calm = drafter.eval()(batch, features, Noise(0)).total
    drafter.train()
    assert drafter(batch, features, Noise(0)).total == drafter(batch, features, Noise(0)).total
    assert drafter(batch, features, Noise(0)).total != calm
    assert drafter(batch, features, Noise(0)).total != drafter(batch, features, Noise(1)).total


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_proposals_are_the_chain_that_training_unrolled(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, **VARIANTS[variant])
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    tree = propose(drafter, state, [0, 2], 4)
    assert tree.num_nodes.tolist() == [4, 4]
    assert tree.tokens[0].tolist() == expected_chain(drafter, target, texts[1], 4)
    assert tree.tokens[1].tolist() == expected_chain(drafter, target, texts[0], 4)


@pytest.mark.parametrize("cuts", [[1], [3, 4], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_any_chunking_of_observations_gives_the_same_state(target, cuts):
    drafter = build(target, REDUCED, num_layers=2)
    text = random_tokens(10, 20)
    whole, parts = opened(drafter, target), opened(drafter, target)
    observe(drafter, whole, target, [1], [text], [(0, 9)])
    edges = [0, *cuts, 9]
    for start, end in itertools.pairwise(edges):
        observe(drafter, parts, target, [1], [text], [(start, end)])
    assert torch.allclose(whole.logits[1], parts.logits[1])
    assert torch.allclose(whole.hidden[1], parts.hidden[1])
    assert torch.allclose(whole.kv.data[:, :, 1, :9], parts.kv.data[:, :, 1, :9])


@pytest.mark.parametrize("num_accepted", range(4))
def test_an_accepted_path_equals_a_fresh_prefill(target, num_accepted):
    drafter = build(target)
    text = random_tokens(12, 30)
    state, fresh = opened(drafter, target), opened(drafter, target)
    observe(drafter, state, target, [0], [text[:7]], [(0, 6)])
    propose(drafter, state, [0], 4)  # leaves its own keys behind, all of them to be dropped
    longer = text[: 7 + num_accepted + 1]
    observe(drafter, state, target, [0], [longer], [(6, 6 + num_accepted + 1)])
    observe(drafter, fresh, target, [0], [longer], [(0, 6 + num_accepted + 1)])
    assert torch.allclose(state.logits[0], fresh.logits[0])
    assert propose(drafter, state, [0], 4).tokens.equal(propose(drafter, fresh, [0], 4).tokens)


def test_proposing_twice_gives_the_same_chain(target):
    drafter = build(target)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(6, 1)], [(0, 5)])
    assert propose(drafter, state, [0], 5).tokens.equal(propose(drafter, state, [0], 5).tokens)


def test_rows_that_observe_nothing_keep_their_proposal(target):
    drafter = build(target)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(9, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 5), (0, 7)])
    before = propose(drafter, state, [0], 3).tokens
    observe(drafter, state, target, [0, 1], texts, [(5, 5), (7, 8)])
    assert propose(drafter, state, [0], 3).tokens.equal(before)


def test_a_slot_that_was_closed_starts_anew_and_the_others_go_on(target):
    drafter = build(target)
    state = opened(drafter, target)
    texts = [random_tokens(9, 1), random_tokens(6, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 8), (0, 5)])
    other = propose(drafter, state, [1], 3).tokens
    drafter.close(state, torch.tensor([0]))
    assert propose(drafter, state, [0, 1], 3).num_nodes.tolist() == [0, 3]
    observe(drafter, state, target, [0], [texts[1]], [(0, 5)])
    tree = propose(drafter, state, [0, 1], 3)
    assert tree.tokens[0].equal(other[0])
    assert tree.tokens[1].equal(other[0])


def test_a_row_near_its_capacity_drafts_only_what_fits_and_harms_no_other(target):
    drafter = build(target)
    state = opened(drafter, target, slots=2, capacity=12)
    texts = [random_tokens(11, 1), random_tokens(5, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 10), (0, 4)])
    tree = propose(drafter, state, [0, 1], 6)
    assert tree.num_nodes.tolist() == [1, 6]
    assert tree.tokens[1].tolist() == expected_chain(drafter, target, texts[1], 6)
    assert tree.tokens[0, :1].tolist() == expected_chain(drafter, target, texts[0], 1)
    again = propose(drafter, state, [0], 6)
    assert again.tokens[0, 0] == tree.tokens[0, 0]


def test_padding_ids_are_never_proposed(target):
    drafter = build(target)
    drafter.lm_head = drafter.lm_head.clone()
    drafter.lm_head[261:] = 100 * drafter.norm.weight.detach()
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(6, 1)], [(0, 5)])
    for sampling in (GREEDY, Sampling(temperature=5.0)):
        tree = propose(drafter, state, [0], 8, sampling)
        assert tree.tokens.max() < 261
        assert tree.law_ids.max() < 261


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
def test_the_reported_law_is_the_softmax_at_the_temperature_and_what_tokens_are_drawn_from(
    target, vocab_ids
):
    drafter = build(target, vocab_ids)
    text = random_tokens(7, 3)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [text], [(0, 6)])
    tree = propose(drafter, state, [1], 3, Sampling(temperature=0.7))
    features = features_of(target, drafter, text[:-1])
    drawn = [*text, *tree.tokens[0].tolist()]
    ids = tree.law_ids[0, 0]
    uniforms = torch.rand(1, 3, generator=torch.Generator().manual_seed(7))
    for k, logits in enumerate(reference_chain(drafter, features, drawn, 5, 3)):
        logits = logits if vocab_ids is not None else logits[:261]
        law = (logits / 0.7).softmax(-1)
        assert torch.allclose(tree.law_probs[0, k], law)
        column = (law.cumsum(0) > uniforms[0, k]).int().argmax()
        assert tree.tokens[0, k] == ids[column]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_works_in_narrow_dtypes(target, dtype):
    exact, drafter = build(target, REDUCED), build(target, REDUCED).to(dtype)
    text = random_tokens(9, 4)
    states = opened(exact, target), opened(drafter, target)
    for head, state in zip((exact, drafter), states, strict=True):
        observe(head, state, target, [0], [text], [(0, 8)])
        tree = propose(head, state, [0], 4, Sampling(temperature=1.0))
        assert torch.allclose(
            tree.law_probs.sum(-1), torch.ones(1, 4, dtype=tree.law_probs.dtype), atol=1e-5
        )
    scale = states[0].logits[0].abs().max()
    assert (states[0].logits[0] - states[1].logits[0]).abs().max() < 0.05 * scale


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "mistral", "gpt2", "gpt_oss"])
def test_every_family_trains_and_drafts(family):
    other = tiny_target(family)
    drafter = build(other, unroll_steps=2)
    batch = make_batch(samples(), 18)
    loss = drafter(batch, other.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert torch.isfinite(loss.total)
    state = opened(drafter, other)
    observe(drafter, state, other, [0], [random_tokens(9, 4)], [(0, 8)])
    assert propose(drafter, state, [0], 3).num_nodes.tolist() == [3]


# ---------------------------------------------------------------- trees

BUSHY = StaticTree(parents=(-1, -1, 0, 0, 1, 2, 2, 4), ranks=(0, 1, 0, 1, 0, 0, 1, 0))
CHAIN = StaticTree(parents=(-1, 0, 1), ranks=(0, 0, 0))
DYNAMIC = DynamicTree(num_nodes=9, top_k=3, depth=4)
HOT = Sampling(temperature=0.7)


@pytest.mark.parametrize("vocab_ids", [None, REDUCED], ids=["whole", "reduced"])
@pytest.mark.parametrize("variant", ["default", "two layers", "3.0"])
def test_every_node_of_a_tree_is_what_a_chain_along_its_path_would_say(target, variant, vocab_ids):
    drafter = build(target, vocab_ids, **VARIANTS[variant])
    texts = [random_tokens(9, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 8), (0, 4)])
    drawn = propose(drafter, state, [0, 2], 4, HOT, tree=BUSHY)
    points = propose(drafter, state, [0, 2], 4, tree=BUSHY)
    dynamic = propose(drafter, state, [0, 2], 4, tree=DYNAMIC)
    columns = {int(token): i for i, token in enumerate(drawn.law_ids[0, 0])}
    for row, text in enumerate(reversed(texts)):
        paths = paths_of(drawn, row)
        laws = replayed_laws(drafter, target, text, paths, temperature=0.7)
        for node, law in enumerate(laws):
            order = law.sort(descending=True).values
            siblings = [n for n in range(node) if BUSHY.parents[n] == BUSHY.parents[node]]
            assert abs(drawn.confidence[row, node] - order[len(siblings)]) < 1e-10
            for sibling in siblings:
                law[columns[int(drawn.tokens[row, sibling])]] = 0
            assert torch.allclose(drawn.law_probs[row, node], law / law.sum(), atol=1e-10)
        for tree in (points, dynamic):
            paths = paths_of(tree, row)
            for node, law in enumerate(replayed_laws(drafter, target, text, paths)):
                own = law[columns[int(tree.tokens[row, node])]]
                assert abs(tree.confidence[row, node] - own) < 1e-10
                assert int((law > own).sum()) == sum(
                    bool(tree.parents[row, n] == tree.parents[row, node]) for n in range(node)
                )


def test_a_tree_without_branches_is_the_chain(target):
    drafter = build(target, REDUCED)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [random_tokens(7, 3)], [(0, 6)])
    for sampling in (GREEDY, HOT):
        chain, tree = (propose(drafter, state, [1], 3, sampling, tree=t) for t in (None, CHAIN))
        assert chain.tokens.equal(tree.tokens)
        assert torch.allclose(chain.law_probs.double(), tree.law_probs.double())


@pytest.mark.parametrize("shape", [BUSHY, DYNAMIC], ids=["static", "dynamic"])
def test_nothing_of_a_tree_outlives_its_round(target, shape):
    drafter = build(target, num_layers=2)
    text = random_tokens(12, 30)
    state, fresh = opened(drafter, target), opened(drafter, target)
    observe(drafter, state, target, [0], [text[:7]], [(0, 6)])
    before = propose(drafter, state, [0], 4)
    first = propose(drafter, state, [0], 4, tree=shape)
    assert propose(drafter, state, [0], 4).tokens.equal(before.tokens)
    assert propose(drafter, state, [0], 4, tree=shape).tokens.equal(first.tokens)
    observe(drafter, state, target, [0], [text[:9]], [(6, 8)])
    observe(drafter, fresh, target, [0], [text[:9]], [(0, 8)])
    again, expected = (propose(drafter, s, [0], 4, tree=shape) for s in (state, fresh))
    assert again.tokens.equal(expected.tokens)
    assert torch.allclose(again.confidence, expected.confidence)


@pytest.mark.parametrize("shape", [BUSHY, DYNAMIC], ids=["static", "dynamic"])
def test_rows_of_a_tree_do_not_depend_on_each_other(target, shape):
    drafter = build(target)
    state = opened(drafter, target, capacity=12)
    texts = [random_tokens(12, 1), random_tokens(5, 2)]
    observe(drafter, state, target, [1, 2], texts, [(0, 11), (0, 4)])  # row 1 is at its capacity
    shared = propose(drafter, state, [0, 1, 2], 4, tree=shape)
    alone = propose(drafter, state, [2], 4, tree=shape)
    assert shared.num_nodes.tolist() == [0, shared.tokens.shape[1], shared.tokens.shape[1]]
    assert shared.tokens[2].equal(alone.tokens[0])
    assert shared.parents[2].equal(alone.parents[0])


def test_a_chain_tells_how_sure_it_is_before_it_draws_and_ends_when_it_is_not(target):
    drafter = build(target, REDUCED)
    text = random_tokens(7, 3)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [text], [(0, 6)])
    assert propose(drafter, state, [0], 4, HOT).confidence is None
    told = propose(drafter, state, [0], 4, HOT, min_confidence=0.0)
    laws = replayed_laws(drafter, target, text, paths_of(told, 0), temperature=0.7)
    assert torch.allclose(told.confidence[0], torch.stack([law.max() for law in laws]))
    assert told.num_nodes.tolist() == [4]
    other = propose(drafter, state, [0], 4, HOT, min_confidence=0.0, seed=8)
    assert not told.tokens.equal(other.tokens)
    assert told.confidence[0, 0] == other.confidence[0, 0]

    bar = float(told.confidence[0].min()) + 1e-6
    first = int((told.confidence[0] < bar).int().argmax())
    cut = propose(drafter, state, [0], 4, HOT, min_confidence=bar)
    assert cut.num_nodes.tolist() == [first]
    assert cut.tokens[0, :first].equal(told.tokens[0, :first])
    assert propose(drafter, state, [0], 4, HOT, min_confidence=1.1).num_nodes.tolist() == [0]


def test_rows_at_temperatures_of_their_own_draft_as_they_would_alone(target):
    drafter = build(target, REDUCED)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(9, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 5), (0, 8)])
    laws = SamplingRows.of([GREEDY, HOT], torch.device("cpu"))
    for shape in (None, BUSHY, DYNAMIC):
        both = propose(drafter, state, [0, 1], 4, laws, tree=shape)
        greedy = propose(drafter, state, [0], 4, tree=shape)
        assert both.tokens[0].equal(greedy.tokens[0])
        hot = propose(drafter, state, [0, 1], 4, HOT, tree=shape)
        assert both.tokens[1].equal(hot.tokens[1])
        assert torch.allclose(both.law_probs[1], hot.law_probs[1])


# ---------------------------------------------------------------- construction


def test_default_taps_are_what_servers_assume_and_stay_apart_in_shallow_targets():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(7) == (2, 3, 4)
    for count in range(1, 7):
        taps = default_taps(count)
        assert list(taps) == sorted(set(taps))
        assert 1 <= taps[0] <= taps[-1] == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "kl"}, r"objective='kl'.*forward_kl"),
        ({"norm_before_fc": True}, "fc_norm and norm_before_fc"),
        ({"tap_layers": []}, r"tap_layers=\[\]"),
        ({"step_decay": 0.0}, "step_decay"),
        ({"step_decay": None}, "step_decay=None with position_weights=decay"),
        ({"position_weights": "d_pace"}, "step_decay=0.8 with position_weights=d_pace"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


def test_taps_the_target_does_not_have_are_refused(target):
    with pytest.raises(ConfigError, match=r"tap_layers=\[2, 9\]"):
        build(target, tap_layers=[2, 9])


def test_a_warm_start_repeats_the_target_layer_on_the_hidden_half(target):
    """With no embedding half, the head's layer on a target state is the target's own layer."""
    drafter = build(target, init_from_layer=-1, init_noise=0.0, fc_norm=False)
    own = target.view.layer_state(3)
    layer = drafter.layers[0]
    assert layer.self_attn.q_proj.weight[:, 64:].equal(own["self_attn.q_proj.weight"])
    assert (layer.self_attn.q_proj.weight[:, :64] == 0).all()
    assert layer.hidden_norm.weight.equal(own["input_layernorm.weight"])
    features = features_of(target, drafter, random_tokens(6, 1))
    assert torch.allclose(drafter._join(features.taps), features.taps[..., -1, :])
    assert torch.allclose(
        drafter.norm(features.taps[0, :, -1]), target.view.final_norm(features.taps[0, :, -1])
    )


def test_a_warm_started_head_continues_the_target(target):
    """Fed with the tap below the last layer, it computes what the last layer computes."""
    drafter = build(target, init_from_layer=3, init_noise=0.0, fc_norm=False, tap_layers=[3])
    ids = random_tokens(8, 1)
    features = features_of(target, drafter, ids)
    batch = make_batch([(ids, 0)], 8)
    out = reference_pass(
        drafter, target.view.embed(torch.tensor(ids)), drafter._join(features.taps)[0]
    )
    assert torch.allclose(drafter.norm(out), features.final[0], atol=1e-5)
    assert torch.isfinite(drafter(batch, features, Noise(0)).total)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt2", "has attn.c_attn"),
        ("gemma3", "has post_feedforward_layernorm"),
        ("qwen3", "has self_attn.k_norm"),
    ],
)
def test_layers_that_cannot_start_a_head_are_refused_with_the_reason(family, why):
    with pytest.raises(ConfigError, match=why):
        build(tiny_target(family), init_from_layer=0)


@pytest.mark.parametrize("layer", [4, -5])
def test_a_start_layer_the_target_does_not_have_is_refused(target, layer):
    with pytest.raises(ConfigError, match=f"init_from_layer={layer}"):
        build(target, init_from_layer=layer)


def test_the_target_is_neither_trained_nor_saved_with_the_head(target):
    drafter = build(target, REDUCED)
    assert not any("lm_head" in name or "embed" in name for name in drafter.state_dict())
    assert "lm_head" in build(target, REDUCED, train_head=True).state_dict()


def test_equal_seeds_build_equal_heads(target):
    one, two = (build_drafter(settings(), target.view, seed=3) for _ in range(2))
    other = build_drafter(settings(), target.view, seed=4)
    assert one.fc.weight.equal(two.fc.weight)
    assert not one.fc.weight.equal(other.fc.weight)


# ---------------------------------------------------------------- serving


def test_serving_weights_name_what_servers_load(target):
    weights = build(target, REDUCED).serving_weights()
    layer = {f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"}
    layer |= {f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    layer |= {
        f"layers.0.{n}.weight"
        for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(weights.tensors) == layer | norms | rest
    assert weights.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert weights.tensors["fc.weight"].shape == (64, 192)
    size = len(REDUCED)
    assert (torch.arange(size) + weights.tensors["d2t"]).equal(REDUCED)
    assert weights.tensors["t2d"].nonzero().flatten().equal(REDUCED)
    assert weights.tensors["lm_head.weight"].equal(target.view.head_rows(REDUCED))
    assert weights.config["draft_vocab_size"] == size
    assert weights.config["tap_layers"] == [1, 2, 4]
    assert weights.config["rope_parameters"]["rope_theta"] == 10000.0


def test_a_whole_vocabulary_ships_no_map_and_a_frozen_head_no_rows(target):
    weights = build(target).serving_weights()
    assert not {"d2t", "t2d", "lm_head.weight"} & set(weights.tensors)
    assert weights.config["draft_vocab_size"] == target.spec.vocab_size
    assert "lm_head.weight" in build(target, train_head=True).serving_weights().tensors
