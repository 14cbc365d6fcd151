"""What penalties see: prompt, answer and the ancestors of each node."""

import pytest
import torch
from sampling_kit import EOS_IDS, VOCAB, path_to, random_parents, random_tokens

from draftlab.errors import ShapeMismatch
from draftlab.sampling import ContextTracker
from draftlab.sampling.context import see_ancestors

CPU = torch.device("cpu")


def tracker(slots=4):
    return ContextTracker(slots, EOS_IDS, CPU)


def facts(context, row, place):
    """What a context says of one place: every known token with its count in answer and path."""
    tokens, is_seen, counts = context.list_tokens()
    found = {}
    for i, token in enumerate(tokens[row].tolist()):
        if is_seen[row, place, i]:
            count = int(counts[row, place, i])
            assert found.setdefault(token, count) == count  # listed twice: the same facts
    return found


def expected(prompt, output):
    return {token: output.count(token) for token in {*prompt, *output}}


@pytest.mark.parametrize("nodes", [0, 1, 2, 5, 13])
@pytest.mark.parametrize("seed", range(3))
def test_a_place_sees_prompt_answer_and_its_own_path(nodes, seed):
    context = tracker()
    prompts = [random_tokens(n, seed=seed + n).tolist() for n in (1, 9, 30)]
    outputs = [random_tokens(n, seed=seed + 50 + n).tolist() for n in (0, 4, 40)]
    slots = [2, 0, 3]
    for slot, prompt, output in zip(slots, prompts, outputs, strict=True):
        context.enter(slot, prompt)
        context.extend(slot, output[:3])
        context.extend(slot, output[3:])
    tokens = random_tokens(3, nodes, seed=seed)
    parents = random_parents(3, nodes, seed)
    seen = context.at(slots, tokens, parents)
    for row in range(3):
        for place in range(nodes + 1):
            path = path_to(place, tokens[row].tolist(), parents[row].tolist())
            output = outputs[row] + path
            assert facts(seen, row, place) == expected(prompts[row], output)
            assert int(seen.num_emitted[row, place]) == len(output)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 8, 21])
def test_ancestors_are_found_by_doubling_as_by_walking(nodes):
    parents = random_parents(6, nodes, seed=nodes)
    parents[0] = torch.arange(nodes) - 1  # a chain is the deepest tree
    sees = see_ancestors(parents)
    for row in range(6):
        for place in range(nodes + 1):
            numbered = path_to(place, list(range(nodes)), parents[row].tolist())
            assert sees[row, place].nonzero().flatten().tolist() == numbered


def test_a_slot_forgets_who_left_it():
    context = tracker()
    context.enter(1, [3, 4])
    context.extend(1, [4, 4])
    context.leave(1)
    context.enter(1, [7])
    assert facts(context.at([1]), 0, 0) == {7: 0}
    assert int(context.at([1]).num_emitted) == 0


def test_more_distinct_tokens_than_the_first_table_holds_are_kept():
    context = tracker()
    context.enter(0, list(range(500)))
    context.extend(0, [*range(490, 900), 899])
    found = facts(context.at([0]), 0, 0)
    assert sorted(found) == list(range(900))
    assert (found[0], found[490], found[899]) == (0, 1, 2)


def test_size_grows_with_distinct_tokens_not_with_the_answer():
    context = tracker()
    context.enter(0, [1, 2])
    context.extend(0, [2, 3] * 1000)
    assert context.at([0]).ids.shape == (1, 3)


def test_an_earlier_context_stays_as_it_was():
    context = tracker()
    context.enter(0, [1])
    before = context.at([0])
    context.extend(0, [1, 2])
    assert facts(before, 0, 0) == {1: 0}


def test_a_tree_of_other_rows_is_refused():
    context = tracker()
    context.enter(0, [1])
    with pytest.raises(ShapeMismatch, match="do not fit 1 rows"):
        context.at([0], random_tokens(2, 3, seed=0, vocab=VOCAB), random_parents(2, 3, seed=0))
