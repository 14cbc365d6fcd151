"""EAGLE heads with a sliding window: training, decoding and one dense mask agree at every position."""

import itertools
from pathlib import Path

import pytest
import torch
import yaml
from eagle_kit import (
    features_of,
    make_batch,
    observe,
    opened,
    paths_of,
    propose,
    random_tokens,
    reference_pass,
    reference_states,
    replayed_laws,
    samples,
)

from draftlab.drafters.base import DraftBudget, drafter_class
from draftlab.drafters.tree import StaticTree
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import Sampling
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

CONF = Path(__file__).parents[2] / "conf" / "drafter"
WINDOW, DEPTHS = 4, 4  # of texts of 12 to 18 tokens
SMALL = {
    "eagle": {"hass_steps": DEPTHS, "feature_noise": 0.0},
    "eagle3": {"unroll_steps": DEPTHS},
    "peagle": {"num_depths": DEPTHS, "num_draft_tokens": DEPTHS, "depth_keep": 1.0},
}
SELF_FED = ("eagle", "eagle3")
SAMPLED = Sampling(temperature=1.5)
# two branches, seven levels: deeper than the window
DEEP = StaticTree(parents=(-1, -1, 0, 1, 2, 4, 5, 6, 7), ranks=(0, 1, 0, 0, 0, 0, 0, 0, 0))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def settings(kind, **changes):
    data = yaml.safe_load((CONF / f"{kind}.yaml").read_text()) | SMALL[kind]
    data |= {"num_layers": 2, "sliding_window": WINDOW} | changes
    return parse_settings(drafter_class(kind).settings_class, data)


def build(kind, target, **changes):
    """Build a head whose parameters are all away from their start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = drafter_class(kind)(settings(kind, **changes), target.view)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return drafter


def trained_states(drafter, target, batch):
    """Give what training's LM head reads: (batch row, row, depth) -> state."""
    seen = []
    scored = drafter._score
    drafter._score = lambda *given: seen.append(given[2:]) or scored(*given)
    drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    del drafter._score
    predictions, hidden = seen[0]
    found = {}
    for k, n in predictions.counts.nonzero().tolist():
        where = (int(predictions.batch_rows[n]), int(predictions.sources[k, n]), k)
        found[where] = hidden[k, n].detach()
    return found


def dense_states(drafter, features, tokens, t, depths):
    """Give what the LM head reads after positions 0..t, by one matrix and one mask."""
    if drafter.kind != "peagle":
        return reference_states(drafter, features, tokens, t, depths)
    embed = drafter.target.embed
    unknown = embed(torch.tensor([drafter.mask_token_id])).expand(depths - 1, -1)
    learned = drafter.fuse_mask().expand(depths - 1, -1)
    embedded = torch.cat([embed(torch.tensor(tokens[1 : t + 2])), unknown])
    hidden = torch.cat([drafter.fuse_taps(features.taps[0, : t + 1]), learned])
    return drafter.norm(reference_pass(drafter, embedded, hidden)[t:])


def dense_laws(drafter, target, text, tokens):
    """Give the laws that a chain of these tokens is drawn from, at SAMPLED's temperature."""
    if drafter.kind != "peagle":
        paths = [tokens[: k + 1] for k in range(len(tokens))]
        return torch.stack(replayed_laws(drafter, target, text, paths, temperature=1.5))
    features = features_of(target, drafter, text[:-1])
    states = dense_states(drafter, features, text, len(text) - 2, len(tokens))
    rows = drafter._head.rows[: target.spec.num_token_ids]
    return (states @ rows.T / 1.5).softmax(-1)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("window", [WINDOW, 7])
@pytest.mark.parametrize("kind", SMALL)
def test_training_reads_at_every_row_and_depth_what_one_dense_mask_gives(kind, window, target):
    drafter = build(kind, target, sliding_window=window)
    text = random_tokens(18, 4)
    found = trained_states(drafter, target, make_batch([(text, 0)], 18))
    features = features_of(target, drafter, text)
    with torch.no_grad():
        for t in range(len(text) - 1):
            depths = [k for k in range(DEPTHS) if (0, t, k) in found]
            if not depths:
                continue
            expected = dense_states(drafter, features, text, t, max(depths) + 1)
            for k in depths:
                assert torch.allclose(found[0, t, k], expected[k], atol=1e-10), (t, k)
    assert len(found) > 3 * DEPTHS


@pytest.mark.parametrize("kind", SMALL)
def test_another_window_is_seen_by_the_rows_that_it_cuts_short_and_no_others(kind, target):
    batch = make_batch([(random_tokens(18, 4), 0)], 18)
    near = trained_states(build(kind, target, num_layers=1), target, batch)
    far = trained_states(build(kind, target, num_layers=1, sliding_window=7), target, batch)
    for (_, t, k), state in near.items():
        is_same = torch.allclose(state, far[0, t, k], atol=1e-10)
        assert is_same == (t + k < WINDOW), (t, k)


@pytest.mark.parametrize("kind", SMALL)
def test_samples_packed_together_are_cut_by_their_own_windows(kind, target):
    drafter = build(kind, target, normalise="sequence")
    packed = make_batch(samples(), 28)
    alone = [make_batch([sample], 12) for sample in samples()]
    total = drafter(packed, target.read_features(packed, drafter.needs), Noise(0)).total
    parts = [drafter(b, target.read_features(b, drafter.needs), Noise(0)).total for b in alone]
    assert torch.allclose(total, sum(parts), rtol=1e-9)


# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", SMALL)
def test_a_chain_has_the_laws_that_training_has_at_its_rows(kind, target):
    drafter, text = build(kind, target), random_tokens(18, 4)
    found = trained_states(drafter, target, make_batch([(text, 0)], 18))
    state = opened(drafter, target)
    rows = drafter._head.rows if kind != "eagle3" else drafter.lm_head
    for t in (2, 5, 9, 12):
        observe(drafter, state, target, [1], [text[: t + 2]], [(0, t + 1)])
        tree = propose(drafter, state, [1], DEPTHS, SAMPLED)
        # only P-EAGLE's deeper laws are told without the tokens between
        for k in range(DEPTHS if kind == "peagle" else 1):
            logits = found[0, t, k] @ rows[: target.spec.num_token_ids].T
            law = (logits / 1.5).softmax(-1)
            assert torch.allclose(tree.law_probs[0, k], law, atol=1e-10), (t, k)
        drafter.close(state, torch.tensor([1]))


@pytest.mark.parametrize("cuts", [[], [1], [6, 14], list(range(1, 16))], ids=str)
@pytest.mark.parametrize("kind", SMALL)
def test_any_chunking_of_observations_gives_the_laws_of_one_dense_mask(kind, cuts, target):
    drafter = build(kind, target)
    text, other = random_tokens(17, 5), random_tokens(6, 6)
    state = opened(drafter, target)
    observe(drafter, state, target, [2], [other], [(0, 5)])
    for start, end in itertools.pairwise([0, *cuts, 16]):
        observe(drafter, state, target, [0], [text], [(start, end)])
        propose(drafter, state, [0], 2)  # leaves its own keys behind, all of them to be dropped
    tree = propose(drafter, state, [2, 0], DEPTHS, SAMPLED)
    for row, known in enumerate((other, text)):
        laws = dense_laws(drafter, target, known, tree.tokens[row].tolist())
        assert torch.allclose(tree.law_probs[row], laws, atol=1e-10)


@pytest.mark.parametrize("kind", SELF_FED)
def test_rows_alone_and_drafts_deeper_than_the_window_have_their_laws(kind, target):
    drafter, text = build(kind, target), random_tokens(11, 7)
    state = opened(drafter, target)
    observe(drafter, state, target, [1], [text], [(0, 10)])
    tree = propose(drafter, state, [1], 9, SAMPLED)
    laws = dense_laws(drafter, target, text, tree.tokens[0].tolist())
    assert torch.allclose(tree.law_probs[0], laws, atol=1e-10)


@pytest.mark.parametrize("kind", SELF_FED)
def test_every_node_of_a_tree_deeper_than_the_window_is_what_a_chain_would_say(kind, target):
    drafter = build(kind, target)
    texts = [random_tokens(14, 11), random_tokens(5, 12)]
    state = opened(drafter, target)
    observe(drafter, state, target, [2, 0], texts, [(0, 13), (0, 4)])
    tree = propose(drafter, state, [0, 2], 8, SAMPLED, tree=DEEP)
    for row, text in enumerate(reversed(texts)):
        laws = replayed_laws(drafter, target, text, paths_of(tree, row), temperature=1.5)
        columns = {int(token): i for i, token in enumerate(tree.law_ids[0, 0])}
        laws[1][columns[int(tree.tokens[row, 0])]] = 0  # the second of two siblings
        for node, law in enumerate(laws):
            assert torch.allclose(tree.law_probs[row, node], law / law.sum(), atol=1e-10), node


@pytest.mark.parametrize("kind", SELF_FED)
def test_rounds_without_the_host_give_the_same_chains(kind, target):
    drafter = build(kind, target)
    texts = [random_tokens(13, 1), random_tokens(9, 2), random_tokens(16, 3)]
    spans = [(0, 12), (0, 8), (0, 15)]
    usual, static = opened(drafter, target), opened(drafter, target)
    observe(drafter, usual, target, [0, 1, 2], texts, spans)
    rounds = drafter.static_rounds()
    budget = DraftBudget(torch.arange(3), 6, SAMPLED)
    uniforms = torch.full((3, 6), 0.4, dtype=torch.float64)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "observe", lambda state, seen: rounds.observe(state, seen, live=20))
        observe(drafter, static, target, [0, 1, 2], texts, spans)
        got = rounds.propose(static, budget, uniforms, live=24)
    expected = drafter.propose(usual, budget, uniforms)
    assert got.tokens.equal(expected.tokens)
    assert torch.allclose(got.law_probs, expected.law_probs, atol=1e-12)


@pytest.mark.parametrize("kind", SMALL)
def test_another_window_drafts_by_other_laws(kind, target):
    """The negative control: were windows ignored, these would be equal."""
    laws = []
    for window in (WINDOW, 5, None):
        drafter = build(kind, target, sliding_window=window)
        state = opened(drafter, target)
        observe(drafter, state, target, [0], [random_tokens(13, 9)], [(0, 12)])
        laws.append(propose(drafter, state, [0], 3, SAMPLED).law_probs[0])
    for one, other in itertools.combinations(laws, 2):
        assert ((one - other).abs().amax(1) > 1e-6).all()


@pytest.mark.parametrize("kind", SMALL)
def test_what_left_the_window_is_not_read_again(kind, target):
    drafter, text = build(kind, target, num_layers=1), random_tokens(15, 8)
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [text], [(0, 14)])
    before = propose(drafter, state, [0], 3, SAMPLED).law_probs
    kv = state.kv if kind != "peagle" else state.memory._kv
    reach = 14 - WINDOW - (DEPTHS + 1 if kind == "peagle" else 0)
    with torch.inference_mode():
        kv.data[:, :, 0, :reach] = 1e6
    assert torch.equal(propose(drafter, state, [0], 3, SAMPLED).law_probs, before)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("kind", "key"), [("eagle", "hass_steps"), ("eagle3", "unroll_steps"), ("peagle", "num_depths")]
)
def test_a_window_that_the_deepest_draft_would_lose_everything_by_is_refused(kind, key):
    with pytest.raises(ConfigError, match=f"sliding_window=3 is below {key}={DEPTHS}"):
        settings(kind, sliding_window=3)


@pytest.mark.parametrize("kind", SMALL)
def test_a_window_as_long_as_the_text_changes_nothing(kind, target):
    text = random_tokens(13, 9)
    laws = []
    for window in (None, 40):
        drafter = build(kind, target, sliding_window=window)
        state = opened(drafter, target)
        observe(drafter, state, target, [0], [text], [(0, 12)])
        laws.append(propose(drafter, state, [0], 3, SAMPLED).law_probs)
    assert torch.equal(laws[0], laws[1])
