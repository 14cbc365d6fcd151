"""Prompt lookup: which match wins, how many tokens it copies, and what it costs."""

import time

import pytest
import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.ngram import Ngram, NgramSettings
from draftlab.errors import ConfigError, NotExportable
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY
from draftlab.settings.base import parse_settings
from draftlab.targets.features import TargetFeatures
from draftlab.targets.tiny import tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def view(target):
    return target.view


@pytest.fixture
def kv(target):
    return target.open_kv(
        slots=1, capacity=8
    )  # the contract hands them over; prompt lookup reads none


def build(view, **changes):
    data = {"kind": "ngram", "num_draft_tokens": 4, "max_ngram": 3, "min_ngram": 1, **changes}
    return Ngram(parse_settings(NgramSettings, data), view)


def observe(drafter, state, ids, anchor, row=0):
    """Show positions `ids` of a row, with `anchor` after them."""
    drafter.observe(
        state,
        Observation(
            rows=torch.tensor([row]),
            ids=torch.tensor([ids]),
            lengths=torch.tensor([len(ids)]),
            next_ids=torch.tensor([[*ids[1:], anchor]]),
            taps=None,
            final=None,
        ),
    )


def drafts(drafter, state, rows=(0,), depth=4):
    budget = DraftBudget(torch.tensor(list(rows)), depth, GREEDY)
    tree = drafter.propose(state, budget, torch.zeros(len(rows), depth, dtype=torch.float64))
    assert tree.is_chain
    counts = tree.num_nodes.tolist()
    return [row[:n] for row, n in zip(tree.tokens.tolist(), counts, strict=True)]


def test_the_most_recent_of_equally_long_matches_wins(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    observe(drafter, state, [1, 2, 3, 9, 1, 2, 3, 8, 7, 6, 1, 2], anchor=3)
    assert drafts(drafter, state) == [[8, 7, 6, 1]]


def test_a_longer_match_wins_over_a_more_recent_one(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    observe(drafter, state, [1, 2, 3, 9, 5, 3, 8, 1, 2], anchor=3)
    assert drafts(drafter, state) == [[9, 5, 3, 8]]


def test_a_match_near_the_end_copies_what_there_is(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    observe(drafter, state, [4, 5, 6], anchor=5)
    assert drafts(drafter, state) == [[6, 5]]


def test_without_a_match_nothing_is_drafted(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    assert drafts(drafter, state) == [[]]
    observe(drafter, state, [1, 2, 3], anchor=4)
    assert drafts(drafter, state) == [[]]


def test_shorter_matches_than_asked_do_not_count(view, kv):
    drafter = build(view, min_ngram=2)
    state = drafter.open(1, 64, kv)
    observe(drafter, state, [5, 6, 7], anchor=5)
    assert drafts(drafter, state) == [[]]
    observe(drafter, state, [5], anchor=6)
    assert drafts(drafter, state) == [[7, 5, 6]]


def test_the_index_agrees_with_a_plain_scan_after_every_token(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    ids = torch.randint(3, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for i in range(len(ids) - 1):
        observe(drafter, state, [ids[i]], anchor=ids[i + 1])
        assert drafts(drafter, state) == [scan(ids[: i + 2], depth=4)]


def scan(ids, depth):
    for n in (3, 2, 1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return ids[start + n : start + n + depth]
    return []


def test_padding_rows_of_the_vocabulary_are_never_copied(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    padding = view.spec.num_token_ids
    observe(drafter, state, [1, 2, padding, 4, 1], anchor=2)
    assert drafts(drafter, state) == [[]]


def test_a_round_costs_far_less_than_a_forward_pass_whatever_the_length(view, kv):
    drafter = build(view)
    state = drafter.open(1, 64, kv)
    ids = torch.randint(500, (20_000,), generator=torch.Generator().manual_seed(0)).tolist()
    observe(drafter, state, ids, anchor=1)
    seen = Observation(
        rows=torch.tensor([0]),
        ids=torch.tensor([[1, 2]]),
        lengths=torch.tensor([2]),
        next_ids=torch.tensor([[2, 1]]),
        taps=None,
        final=None,
    )
    budget = DraftBudget(torch.tensor([0]), 4, GREEDY)
    uniforms = torch.zeros(1, 4, dtype=torch.float64)
    best = min(timed_round(drafter, state, seen, budget, uniforms) for _ in range(50))
    assert best < 1e-3  # seconds; about 50 microseconds without the tests' shape checks


def timed_round(drafter, state, seen, budget, uniforms):
    start = time.perf_counter()
    drafter.observe(state, seen)
    drafter.propose(state, budget, uniforms)
    return time.perf_counter() - start


def test_ngrams_in_the_wrong_order_are_refused(view):
    with pytest.raises(ConfigError, match="min_ngram=4 exceeds max_ngram=3"):
        build(view, min_ngram=4)


def test_training_and_export_are_refused_with_what_to_do_instead(view):
    drafter = build(view)
    one = torch.zeros(1, 2, dtype=torch.int64)
    batch = TokenBatch(one, one.bool(), one, one, one)
    with pytest.raises(ConfigError, match="nothing to train"):
        drafter.forward(batch, TargetFeatures(None, None), Noise(0))
    with pytest.raises(NotExportable, match="prompt_lookup_max"):
        drafter.serving_weights()
