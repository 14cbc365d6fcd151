"""Suffix decoding: counts against a plain scan, which match wins, trees, earlier answers, cost."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.drafters._suffix_index import SuffixIndex
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.suffix import Suffix, SuffixSettings
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.errors import ConfigError, NotExportable
from draftlab.sampling import GREEDY, Sampling
from draftlab.settings.base import parse_settings
from draftlab.targets.tiny import tiny_target

# ---------------------------------------------------------------- the index


def follow_counts(texts, run):
    """What followed a run in texts, by a plain scan: token -> times."""
    found = {}
    for text in texts:
        for start in range(len(text) - len(run)):
            if text[start : start + len(run)] == run:
                token = text[start + len(run)]
                found[token] = found.get(token, 0) + 1
    return found


small_texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(small_texts, st.integers(2, 6))
def test_counts_agree_with_a_plain_scan(texts, depth):
    index, most = SuffixIndex(depth), depth - 1
    for text in texts:
        index.start()
        for token in text:
            index.append(token)
    last = texts[-1]
    found = dict(enumerate_runs(index, last, most))
    for length in range(1, min(most, len(last)) + 1):
        expected = follow_counts(texts, last[-length:])
        assert (length in found) == bool(expected)
        if expected:
            total = sum(expected.values())
            shares = {token: share for token, _, share in index.ranked(found[length], 9)}
            assert shares == {token: times / total for token, times in expected.items()}
            likeliest = index.likeliest(found[length])
            assert likeliest == index.ranked(found[length], 1)[0]
            assert likeliest[2] == max(shares.values())
    assert index.num_states <= 2 * sum(map(len, texts)) + 1


def enumerate_runs(index, text, most):
    """Spread the classes of `matches` over every length they stand for; `find` must agree."""
    matches = list(index.matches(most))
    assert matches == list(index.find(text[-most:]))
    for place, (state, longest) in enumerate(matches):
        shorter = matches[place + 1][1] if place + 1 < len(matches) else 0
        yield from ((length, state) for length in range(shorter + 1, longest + 1))


def test_the_latest_of_equally_frequent_followers_is_the_likeliest():
    index = SuffixIndex(4)
    for token in (1, 2, 9, 1, 3, 9, 1):
        index.append(token)
    state, matched = next(index.matches(3))
    assert matched == 2  # 9 1, which was followed by 3 alone
    assert index.likeliest(state)[0] == 3
    (short,) = [state for state, matched in index.matches(1)]
    assert [token for token, _, _ in index.ranked(short, 5)] == [3, 2]


def test_no_run_reaches_from_one_text_into_another():
    index = SuffixIndex(4)
    for text in ((1, 2), (3, 4), (2,)):
        index.start()
        for token in text:
            index.append(token)
    assert list(index.matches(3)) == []


# ---------------------------------------------------------------- the drafter


TARGET = tiny_target()
KV = TARGET.open_kv(slots=2, capacity=8)  # the contract hands it over; nobody here reads it


@pytest.fixture(scope="module")
def view():
    return TARGET.view


def opened(drafter, slots):
    return drafter.open(slots, 64, KV)


def build(view, **changes):
    data = {
        "kind": "suffix",
        "num_draft_tokens": 4,
        "max_match_tokens": 8,
        "draft_per_match": 1.0,
        "min_path_probability": 0.1,
        "num_global_tokens": 0,
        **changes,
    }
    return Suffix(parse_settings(SuffixSettings, data), view)


def observe(drafter, state, ids, anchor, row=0):
    after = torch.tensor([[*ids[1:], anchor]])
    lengths = torch.tensor([len(ids)])
    seen = Observation(torch.tensor([row]), torch.tensor([ids]), lengths, after, None, None)
    drafter.observe(state, seen)


def propose(drafter, state, rows=(0,), depth=4, sampling=GREEDY, **choices):
    budget = DraftBudget(torch.tensor(list(rows)), depth, sampling, **choices)
    return drafter.propose(state, budget, torch.rand(len(rows), 8, dtype=torch.float64))


def drafts(drafter, state, rows=(0,), **choices):
    tree = propose(drafter, state, rows, **choices)
    counts = tree.num_nodes.tolist()
    return [row[:n] for row, n in zip(tree.tokens.tolist(), counts, strict=True)]


def test_what_followed_most_often_is_drafted(view):
    drafter = build(view, draft_per_match=3.0)
    state = opened(drafter, 1)
    observe(drafter, state, [5, 1, 2, 5, 1, 2, 5, 1, 3, 5], anchor=1)
    assert drafts(drafter, state)[0][:2] == [2, 5]


def test_a_draft_is_as_long_as_its_match_allows(view):
    drafter = build(view)
    state = opened(drafter, 1)
    observe(drafter, state, [7, 1, 2, 3, 4, 5, 6, 8, 1, 2], anchor=3)
    assert drafts(drafter, state) == [[4, 5, 6]]
    assert drafts(drafter, state, depth=2) == [[4, 5]]
    short = build(view, draft_per_match=0.5)
    state = opened(short, 1)
    observe(short, state, [7, 1, 2, 3, 4, 5, 6, 8, 1, 2], anchor=3)
    assert drafts(short, state) == [[4]]


def test_a_draft_ends_where_its_path_gets_unlikely(view):
    ids = [1, 2, 9, 1, 2, 8, 1, 2, 7, 1]
    for floor, expected in ((0.5, [[2]]), (0.2, [[2, 7]])):
        drafter = build(view, min_path_probability=floor, draft_per_match=2.0)
        state = opened(drafter, 1)
        observe(drafter, state, ids[:-1], anchor=1)
        found = drafts(drafter, state)
        assert [row[:2] for row in found] == expected


def test_confidence_is_the_share_and_min_confidence_ends_a_chain(view):
    drafter = build(view, draft_per_match=2.0, min_path_probability=0.0)
    state = opened(drafter, 1)
    observe(drafter, state, [1, 2, 9, 1, 2, 8, 1, 2, 7], anchor=1)
    assert propose(drafter, state).confidence is None
    confidence = propose(drafter, state, min_confidence=0.0).confidence[0]
    assert confidence[:2].tolist() == pytest.approx([1.0, 1 / 3])
    assert drafts(drafter, state, min_confidence=0.5) == [[2]]


def test_drafts_are_points_and_the_same_whatever_is_drawn(view):
    drafter = build(view)
    state = opened(drafter, 1)
    observe(drafter, state, [1, 2, 3, 1, 2, 4, 1], anchor=2)
    trees = [propose(drafter, state, sampling=Sampling(temperature=1.0)) for _ in range(3)]
    assert all(tree.law_probs.shape[2] == 1 for tree in trees)
    assert len({tuple(tree.tokens[0].tolist()) for tree in trees}) == 1


def test_padding_rows_of_the_vocabulary_are_never_copied(view):
    padding = view.spec.num_token_ids
    drafter = build(view)
    for choices in ({}, {"tree": DynamicTree(6, 2, 3)}, {"tree": StaticTree((-1, 0), (0, 0))}):
        state = opened(drafter, 1)
        observe(drafter, state, [1, 2, padding, 4, 1], anchor=2)
        assert drafts(drafter, state, **choices) == [[]]


# ---------------------------------------------------------------- trees


def paths_of(tree, row=0):
    found = []
    for node in range(int(tree.num_nodes[row])):
        parent = int(tree.parents[row, node])
        assert parent < node
        found.append((*(found[parent] if parent >= 0 else ()), int(tree.tokens[row, node])))
    return found


BRANCHING = [5, 1, 2, 5, 1, 2, 5, 1, 3, 5, 1, 4]  # after 5 1: 2 twice, 3 once, 4 once


def test_a_dynamic_tree_takes_the_likeliest_paths_first(view):
    drafter = build(view, draft_per_match=1.0)
    state = opened(drafter, 1)
    observe(drafter, state, [*BRANCHING, 5], anchor=1)
    tree = propose(drafter, state, tree=DynamicTree(4, 2, 2))
    assert tree.tokens.shape == (1, 4)
    # two tokens match, so two may follow; of the equally rare ones the lower id comes first
    assert paths_of(tree) == [(2,), (2, 5), (3,), (3, 5)]


def test_a_static_tree_is_filled_as_far_as_there_are_choices(view):
    drafter = build(view, draft_per_match=1.0, min_path_probability=0.0)
    state = opened(drafter, 1)
    observe(drafter, state, [*BRANCHING, 5], anchor=1)
    shape = StaticTree((-1, -1, -1, -1, 0, 0, 1), (0, 1, 2, 3, 0, 1, 0))
    tree = propose(drafter, state, tree=shape)
    # there is no fourth choice after 5 1, and only one after 2
    assert paths_of(tree) == [(2,), (3,), (4,), (2, 5), (3, 5)]
    assert tree.tokens.shape == (1, 7)


def test_a_tree_of_one_choice_a_node_is_the_chain(view):
    drafter = build(view, draft_per_match=2.0)
    state = opened(drafter, 1)
    observe(drafter, state, [*BRANCHING, 5], anchor=1)
    chain = drafts(drafter, state)
    assert drafts(drafter, state, tree=DynamicTree(4, 1, 4)) == chain
    assert drafts(drafter, state, tree=StaticTree((-1, 0, 1, 2), (0, 0, 0, 0))) == chain


# ---------------------------------------------------------------- earlier answers


def test_an_earlier_answer_is_copied_from_when_it_is_kept(view):
    for kept, expected in ((0, [[]]), (100, [[13, 14]])):
        drafter = build(view, num_global_tokens=kept)
        state = opened(drafter, 2)
        observe(drafter, state, [1, 2], anchor=3)
        propose(drafter, state)  # drafting begins: what follows is the answer
        observe(drafter, state, [3, 11, 12, 13, 14], anchor=15)
        drafter.close(state, torch.tensor([0]))
        observe(drafter, state, [40, 11], anchor=12, row=1)
        assert drafts(drafter, state, rows=(1,)) == expected


def test_prompts_are_not_kept_as_answers(view):
    drafter = build(view, num_global_tokens=100)
    state = opened(drafter, 2)
    observe(drafter, state, [1, 2, 3], anchor=4)
    propose(drafter, state)
    drafter.close(state, torch.tensor([0]))
    observe(drafter, state, [9, 1], anchor=2, row=1)
    assert drafts(drafter, state, rows=(1,)) == [[]]


def test_earlier_answers_take_no_more_memory_than_they_are_given(view):
    drafter = build(view, num_global_tokens=200)
    state = opened(drafter, 1)
    random = torch.Generator().manual_seed(0)
    for _ in range(60):
        answer = torch.randint(200, (30,), generator=random).tolist()
        state.earlier.add(answer)
        assert sum(index.num_states for index in state.earlier.indices()) <= 2 * 200 + 2
    state.earlier.add(list(range(200)))  # longer than half: its end is kept
    newest = state.earlier.indices()[0]
    assert next(newest.find([197, 198]))[1] == 2
    assert list(newest.find([20, 21])) == []


# ---------------------------------------------------------------- cost and refusals


def test_a_round_costs_the_same_whatever_the_length(view):
    """About 40 microseconds at 4,096 tokens without the tests' shape checks."""
    drafter, best = build(view), []
    for count in (200, 8_000):
        state = opened(drafter, 1)
        ids = torch.randint(500, (count,), generator=torch.Generator().manual_seed(0)).tolist()
        observe(drafter, state, ids, anchor=1)
        best.append(min(timed_round(drafter, state) for _ in range(50)))
    assert best[1] < 4 * best[0]


def timed_round(drafter, state):
    start = time.perf_counter()
    observe(drafter, state, [1, 2], anchor=1)
    propose(drafter, state)
    return time.perf_counter() - start


def test_text_that_repeats_one_token_costs_no_more_than_a_bounded_walk(view):
    """The automaton's worst case: every run is a suffix of every longer one."""
    steps = []
    for count in (2_000, 8_000):
        index = SuffixIndex(16)
        for _ in range(count):
            index.append(7)
        began = time.perf_counter()
        for _ in range(500):
            index.append(7)
        steps.append(time.perf_counter() - began)
    assert steps[1] < 3 * steps[0] + 0.02


def test_settings_out_of_range_and_export_are_refused_in_words(view):
    with pytest.raises(ConfigError, match=r"min_path_probability=1\.5"):
        build(view, min_path_probability=1.5)
    with pytest.raises(NotExportable, match="suffix_decoding_max_spec_factor"):
        build(view).serving_weights()
