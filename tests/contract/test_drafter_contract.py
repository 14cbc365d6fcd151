"""The contract of drafters/base.py, held against every kind there is and two toys."""

import math

import pytest
import torch
import yaml
from contract_kit import (
    CASES,
    KINDS,
    K,
    Session,
    alone,
    assert_same_trees,
    make,
    some_ids,
    training_batch,
)
from toy_drafters import TOYS

from draftlab.drafters.base import drafter_class, num_trainable
from draftlab.drafters.store import load_drafter, save_drafter
from draftlab.errors import ConfigError, NotExportable
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, Sampling
from draftlab.settings.locate import conf_dir
from draftlab.targets.tiny import tiny_target

NOT_SERVED = {"ngram", "hetero", "hydra", "self_speculative", "suffix", "hybrid", *TOYS}
SAMPLED = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def drafter(case, target):
    return make(case, target)


def is_trainable(drafter):
    return num_trainable(drafter) > 0


def test_every_yaml_holds_exactly_the_keys_of_its_settings():
    paths = sorted((conf_dir() / "drafter").glob("*.yaml"))
    assert {path.stem for path in paths} >= set(KINDS)
    for path in paths:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert set(data) == set(drafter_class(data["kind"]).settings_class.model_fields), path.name
        lines = path.read_text(encoding="utf-8").splitlines()
        bare = [ln for ln in lines if ":" in ln and "#" not in ln and not ln.startswith("kind:")]
        assert not bare, f"{path.name}: keys without a comment: {bare}"


def test_training_lowers_a_finite_loss_and_leaves_the_target_alone(case, target):
    drafter = make(case, target).train()
    batch = training_batch()
    features = target.read_features(batch, drafter.needs)
    if not is_trainable(drafter):
        with pytest.raises(ConfigError, match="nothing to train"):
            drafter(batch, features, Noise(0))
        return
    before = target.view.head_rows(None).clone()
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.0
    )
    losses = []
    for _ in range(12):
        loss = drafter(batch, features, Noise(0))
        assert loss.count.min() > 0
        assert (loss.hit_sum <= loss.count).all()
        assert (loss.overlap_sum <= loss.count + 1e-6).all()
        losses.append(loss.total.item())
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
    assert all(math.isfinite(value) for value in losses)
    assert losses[-1] < 0.97 * losses[0]
    assert torch.equal(target.view.head_rows(None), before)


def test_a_packed_batch_costs_the_sum_of_its_samples(drafter, target):
    if not is_trainable(drafter):
        pytest.skip("nothing to train")
    batch = training_batch()
    packed = drafter(batch, target.read_features(batch, drafter.needs), Noise(0))
    parts = []
    for sample in (5, 6, 7):
        one = alone(batch, sample)
        parts.append(drafter(one, target.read_features(one, drafter.needs), Noise(0)))
    assert torch.isclose(packed.total, sum(part.total for part in parts), rtol=1e-6)
    assert torch.equal(packed.count, sum(part.count for part in parts))
    assert torch.allclose(packed.loss_sum, sum(part.loss_sum for part in parts), rtol=1e-6)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_are_well_formed_also_for_rows_that_hold_nothing(drafter, target, sampling):
    session = Session(target, drafter, slots=3)
    session.show(1, some_ids(9), anchor=some_ids(10)[-1])
    tree = session.propose([2, 1, 0], sampling)
    assert tree.tokens.shape == (3, K)
    assert tree.is_chain
    assert tree.num_nodes[0] == 0
    assert tree.num_nodes[2] == 0
    assert 0 <= tree.num_nodes[1] <= K
    assert ((tree.tokens >= 0) & (tree.tokens < target.spec.num_token_ids)).all()
    for node in range(int(tree.num_nodes[1])):
        law = tree.law_probs[1, node]
        assert torch.isclose(law.sum(), torch.ones((), dtype=law.dtype), atol=1e-5)
        ids = torch.arange(law.shape[0]) if tree.law_ids is None else tree.law_ids[1, node]
        assert ids.unique().numel() == ids.numel()
        assert law[ids == tree.tokens[1, node]].item() > 0


def test_any_chunking_of_a_prompt_gives_the_same_proposals(drafter, target):
    ids, anchor = some_ids(17), 3
    whole = Session(target, drafter)
    whole.show(0, ids, anchor)
    for sampling in (GREEDY, SAMPLED):
        expected = whole.propose([0], sampling)
        for width in (1, 3, 8):
            pieces = Session(target, drafter)
            pieces.show_in_chunks(0, ids, anchor, width)
            assert_same_trees(pieces.propose([0], sampling), expected)


@pytest.mark.parametrize("num_accepted", range(K + 1))
def test_an_accepted_path_of_any_length_equals_a_fresh_prefill(drafter, target, num_accepted):
    ids = some_ids(11)
    session, fresh = Session(target, drafter), Session(target, drafter)
    session.show(0, ids[:-1], anchor=ids[-1])
    tree = session.propose([0])
    accepted = tree.tokens[0, : min(num_accepted, int(tree.num_nodes[0]))].tolist()
    correction = 9
    session.show(0, [ids[-1], *accepted], anchor=correction)
    fresh.show(0, [*ids, *accepted], anchor=correction)
    assert_same_trees(session.propose([0]), fresh.propose([0]))
    # and once more, so that what the first round left behind would show
    session.show(0, [correction], anchor=4)
    fresh.show(0, [correction], anchor=4)
    assert_same_trees(session.propose([0]), fresh.propose([0]))


def test_rows_that_enter_and_leave_change_nothing_for_the_others(drafter, target):
    ids = some_ids(12)
    alone_, shared = Session(target, drafter, slots=1), Session(target, drafter, slots=3)
    alone_.show(0, ids, anchor=5)
    shared.show(1, some_ids(20, seed=1), anchor=2)
    shared.show(2, ids, anchor=5)
    shared.propose([1, 2])
    shared.close(1)
    shared.show(1, some_ids(6, seed=2), anchor=8)
    shared.propose([1])
    assert_same_trees(shared.propose([2]), alone_.propose([0]))
    fresh = Session(target, drafter, slots=1)
    fresh.show(0, some_ids(6, seed=2), anchor=8)
    assert_same_trees(shared.propose([1]), fresh.propose([0]))


def test_a_saved_drafter_loads_bit_for_bit(case, target, tmp_path):
    drafter = make(case, target)
    with torch.no_grad():
        for i, parameter in enumerate(drafter.parameters()):
            parameter.add_(0.01 * (i + 1))
    save_drafter(drafter, tmp_path, extra={"step": 3})
    loaded = load_drafter(tmp_path, target.view)
    own, theirs = drafter.state_dict(), loaded.state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    a, b = Session(target, drafter), Session(target, loaded.eval())
    for session in (a, b):
        session.show(0, some_ids(9), anchor=1)
    assert_same_trees(a.propose([0], SAMPLED), b.propose([0], SAMPLED))


def test_serving_weights_are_finite_tensors_or_refused_in_words(drafter, target):
    if drafter.kind in NOT_SERVED:
        with pytest.raises(NotExportable, match=drafter.kind):
            drafter.serving_weights()
        return
    weights = drafter.serving_weights()
    assert weights.tensors
    assert all(t.isfinite().all() for t in weights.tensors.values() if t.is_floating_point())
    assert not any(t.requires_grad for t in weights.tensors.values())


def test_padding_rows_of_the_vocabulary_are_never_proposed(case):
    """Case O-14, with padding logits forced to the maximum."""
    target = tiny_target(seed=3)
    known = target.spec.num_token_ids
    rows = target.view.head_rows(None)
    assert known < rows.shape[0] - 1
    direction = torch.randn(
        rows.shape[1], dtype=rows.dtype, generator=torch.Generator().manual_seed(0)
    )
    # one of a pair of opposite rows beats every token, whatever the hidden state
    rows[known::2], rows[known + 1 :: 2] = 1e3 * direction, -1e3 * direction
    drafter = make(case, target)
    session = Session(target, drafter)
    session.show(0, some_ids(12), anchor=some_ids(13)[-1])
    for sampling in (GREEDY, SAMPLED):
        tree = session.propose([0], sampling)
        count = int(tree.num_nodes[0])
        assert (tree.tokens[0, :count] < known).all()
        law = tree.law_probs[0, :count]
        if tree.law_ids is None:
            assert (law[:, known:] == 0).all()
        else:
            assert (law[tree.law_ids[0, :count] >= known] == 0).all()
