"""What every drafter on the target's hidden states does alike: training, rows, dtypes, refusals."""

import pytest
import torch
from building import REDUCED, SMALL, build, settings
from eagle_kit import make_batch, observe, opened, propose, random_tokens, samples, train_shortly

from draftlab.drafters.tree import DynamicTree
from draftlab.errors import ConfigError
from draftlab.randomness import Noise
from draftlab.sampling import Sampling
from draftlab.targets.tiny import tiny_target

KINDS = pytest.mark.parametrize("kind", SMALL)
# whose tokens do not depend on those drafted before
AT_ONCE = ("peagle", "dflash", "medusa")
# which remember as many positions as a slot has
BOUNDED = [kind for kind in SMALL if kind not in ("hydra", "medusa")]

# ---------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("kind", "changes", "left"),
    [
        ("eagle", {"hass_steps": 2}, 0.5),
        ("eagle3", {"unroll_steps": 2}, 0.5),
        ("peagle", {"num_layers": 1}, 0.5),
        ("dflash", {"num_layers": 1, "objective": "forward_kl"}, 0.2),
    ],
)
def test_training_on_a_few_answers_lowers_the_loss_and_raises_acceptance(
    target, kind, changes, left
):
    drafter = build(kind, target, **changes)
    losses = train_shortly(drafter, target)
    assert losses[-1].total < left * losses[0].total
    assert losses[-1].overlap_sum.sum() > losses[0].overlap_sum.sum() + 10


@KINDS
def test_nothing_to_learn_gives_zero_and_a_gradient_for_every_parameter(target, kind):
    drafter = build(kind, target)
    batch = make_batch([(random_tokens(6, 1), 6)], 6)
    loss = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert loss.total.item() == 0
    assert loss.count.sum() == 0
    assert all(p.grad is not None for p in drafter.parameters())


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "dflash"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3", "mistral", "gpt2", "gpt_oss"])
def test_every_family_trains_and_drafts(family, kind):
    other = tiny_target(family)
    drafter = build(kind, other)
    batch = make_batch(samples(), 18)
    loss = drafter(batch, other.read_features(batch, drafter.needs), Noise(0))
    loss.total.backward()
    assert torch.isfinite(loss.total)
    state = opened(drafter, other)
    observe(drafter, state, other, [0], [random_tokens(9, 4)], [(0, 8)])
    assert propose(drafter, state, [0], 3).num_nodes.tolist() == [3]


# ---------------------------------------------------------------- decoding


@KINDS
def test_rows_that_observe_nothing_keep_their_proposal(target, kind):
    drafter = build(kind, target, stir=0.1)
    state = opened(drafter, target)
    texts = [random_tokens(6, 1), random_tokens(9, 2)]
    observe(drafter, state, target, [0, 1], texts, [(0, 5), (0, 7)])
    before = propose(drafter, state, [0], 3).tokens
    observe(drafter, state, target, [0, 1], texts, [(5, 5), (7, 8)])
    assert propose(drafter, state, [0], 3).tokens.equal(before)


@KINDS
def test_a_slot_that_was_closed_starts_anew_and_the_others_go_on(target, kind):
    drafter = build(kind, target, stir=0.1)
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


@pytest.mark.parametrize("kind", BOUNDED)
def test_a_row_near_its_capacity_drafts_only_what_fits_and_harms_no_other(target, kind):
    drafter = build(kind, target, stir=0.1)
    depth = drafter.max_draft_tokens or 6
    texts = [random_tokens(11, 1), random_tokens(5, 2)]
    tight, roomy = opened(drafter, target, slots=2, capacity=12), opened(drafter, target)
    for state in (tight, roomy):
        observe(drafter, state, target, [0, 1], texts, [(0, 10), (0, 4)])
    tree, expected = (propose(drafter, state, [0, 1], depth) for state in (tight, roomy))
    assert tree.num_nodes.tolist() == [1, depth]
    assert tree.tokens[1].equal(expected.tokens[1])
    assert tree.tokens[0, 0] == expected.tokens[0, 0]
    assert propose(drafter, tight, [0], depth).tokens[0, 0] == tree.tokens[0, 0]


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_works_in_narrow_dtypes(target, dtype, kind):
    exact = build(kind, target, REDUCED, stir=0.1)
    narrow = build(kind, target, REDUCED, stir=0.1).to(dtype)
    laws = []
    for drafter in (exact, narrow):
        state = opened(drafter, target)
        observe(drafter, state, target, [0], [random_tokens(9, 4)], [(0, 8)])
        law = propose(drafter, state, [0], 3, Sampling(temperature=30.0)).law_probs
        assert torch.allclose(law.sum(-1), torch.ones_like(law[..., 0]), atol=1e-5)
        laws.append(law[:, : 3 if kind in AT_ONCE else 1].float())
    assert torch.allclose(*laws, atol=0.01)


@pytest.mark.parametrize("kind", ["peagle", "dflash", "dspark", "hydra", "medusa"])
def test_more_than_a_drafter_proposes_is_refused(target, kind):
    drafter = build(kind, target)
    most = drafter.max_draft_tokens
    state = opened(drafter, target)
    observe(drafter, state, target, [0], [random_tokens(6, 1)], [(0, 5)])
    with pytest.raises(ConfigError, match=f"num_draft_tokens={most + 1} is more than the {most}"):
        propose(drafter, state, [0], most + 1)
    with pytest.raises(ConfigError, match=f"depth of the tree={most + 1} is more than the {most}"):
        propose(drafter, state, [0], most, tree=DynamicTree(8, top_k=2, depth=most + 1))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        *((kind, {"objective": "kl"}, r"objective='kl': expected one of") for kind in SMALL),
        *(
            (kind, {"tap_layers": []}, r"tap_layers=\[\].*at least one tap")
            for kind in ("eagle3", "peagle", "dflash", "dspark")
        ),
        ("eagle3", {"norm_before_fc": True}, "fc_norm and norm_before_fc"),
        ("eagle3", {"step_decay": 0.0}, "step_decay"),
        ("eagle3", {"step_decay": None}, "step_decay=None with position_weights=decay"),
        ("eagle3", {"position_weights": "d_pace"}, "step_decay=0.8 with position_weights=d_pace"),
        ("hydra", {"head_decay": None}, "head_decay=None with position_weights=decay"),
        ("medusa", {"position_weights": "d_pace"}, "head_decay=0.8 with position_weights=d_pace"),
        ("peagle", {"num_depths": 3}, r"num_draft_tokens=4 is more than num_depths=3"),
        ("peagle", {"depth_keep": 0.0}, "depth_keep"),
        ("dflash", {"num_draft_tokens": 4}, r"num_draft_tokens=4.*at most 3"),
        ("dspark", {"num_draft_tokens": 4}, r"num_draft_tokens=4.*at most 3"),
        ("dflash", {"sliding_window": 3}, r"sliding_window=3 is below block_size=4"),
        ("dflash", {"block_size": 1}, "block_size"),
        *(
            (kind, changes, message)
            for kind in ("hydra", "medusa")
            for changes, message in (
                ({"num_heads": 2}, "num_heads=2 is below num_draft_tokens=3"),
                ({"head_rank": 8}, "head_rank=8 with head=tied"),
                ({"head": "low_rank"}, "head_rank=None with head=low_rank"),
            )
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(kind, **changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        *(
            (kind, {"tap_layers": [2, 9]}, r"tap_layers=\[2, 9\]")
            for kind in ("eagle3", "peagle", "dflash")
        ),
        *(
            (kind, {"mask_token_id": token}, message)
            for kind in ("peagle", "dflash")
            for token, message in (
                (320, r"mask_token_id=320: expected an id in 0..319"),
                (256, r"mask_token_id=256.*no end token"),
            )
        ),
        *(
            (kind, {"head": "low_rank", "head_rank": 65}, "head_rank=65 exceeds .* hidden size 64")
            for kind in ("hydra", "medusa")
        ),
    ],
)
def test_what_the_target_does_not_have_is_refused(target, kind, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(kind, target, **changes)
