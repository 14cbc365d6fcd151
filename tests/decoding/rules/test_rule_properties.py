"""What holds for every rule on every tree, by hypothesis: laws with zeros, points, last-bit noise."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftlab.decoding.verify import (
    verify_block,
    verify_exact_match,
    verify_lossy_threshold,
    verify_lossy_typical,
    verify_speculative,
)
from draftlab.drafters.tree import DraftTree

ALMOST_ONE = 1 - 2**-53
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True, database=None)

CHAIN_RULES = {"speculative": verify_speculative, "block": verify_block}
TREE_RULES = {
    "speculative": verify_speculative,
    "exact match": lambda tree, probs, accept_uniforms, next_uniforms: verify_exact_match(
        tree, probs.argmax(2)
    ),
    "typical": lambda tree, probs, accept_uniforms, next_uniforms: verify_lossy_typical(
        tree, probs, next_uniforms=next_uniforms, epsilon=0.1, delta=0.3
    ),
    "threshold": lambda tree, probs, accept_uniforms, next_uniforms: verify_lossy_threshold(
        tree, probs, next_uniforms=next_uniforms, threshold=0.5
    ),
}


class Round:
    """A draft tree, the target's laws and the uniforms of one round."""

    def __init__(self, tree, probs, accept, following):
        self.tree, self.probs, self.accept, self.following = tree, probs, accept, following

    def judge(self, rule):
        return rule(
            self.tree, self.probs, accept_uniforms=self.accept, next_uniforms=self.following
        )

    def take(self, rows):
        tree = self.tree
        ids = None if tree.law_ids is None else tree.law_ids[rows]
        parts = (tree.tokens[rows], tree.parents[rows], tree.num_nodes[rows], tree.law_probs[rows])
        return Round(
            DraftTree(*parts, ids), self.probs[rows], self.accept[rows], self.following[rows]
        )


def random_law(generator, kind, vocab):
    weights = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 3
    if kind == "sparse":
        weights *= torch.rand(vocab, generator=generator) < 0.5
    if kind == "point" or not weights.any():
        weights = torch.zeros_like(weights)
        weights[int(torch.randint(vocab, (), generator=generator))] = 1.0
    return weights / weights.sum()


def nudged(law, generator):
    """Change a law in its last bits, as another order of summation would."""
    steps = torch.randint(-1, 2, law.shape, generator=generator)
    target = torch.where(steps > 0, 1.0, 0.0).to(law.dtype)
    return torch.where((steps == 0) | (law == 0), law, law.nextafter(target))


@st.composite
def rounds(draw, chain=False, kinds=("plain", "sparse", "point"), points=None):
    """Build a round of 1..3 rows; siblings differ, and each law is one its token can come from."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, nodes, vocab = draw(st.integers(1, 3)), draw(st.integers(0, 6)), draw(st.integers(3, 6))
    is_points = draw(st.booleans()) if points is None else points
    same_as_target = draw(st.booleans())
    as_ids = draw(st.booleans())
    lines = []
    for _ in range(rows):
        probs = [
            random_law(generator, draw(st.sampled_from(kinds)), vocab) for _ in range(nodes + 1)
        ]
        tokens, parents, laws = [], [], []
        for node in range(nodes):
            parent = node - 1 if chain else int(torch.randint(-1, node, (), generator=generator))
            law = probs[parent + 1] if same_as_target else random_law(generator, "plain", vocab)
            law = nudged(law, generator)
            siblings = [x for x, a in zip(tokens, parents, strict=True) if a == parent]
            law[siblings] = 0
            if not law.any():  # nothing left to draw: hang it below the last node instead
                parent, law = node - 1, random_law(generator, "plain", vocab)
            law = law / law.sum()
            tokens.append(int(torch.multinomial(law, 1, generator=generator)))
            parents.append(parent)
            laws.append(law)
        lines.append((tokens, parents, laws, torch.stack(probs)))
    tokens = torch.tensor([line[0] for line in lines], dtype=torch.int64).view(rows, nodes)
    laws = torch.zeros(rows, nodes, vocab, dtype=torch.float64)
    for row, line in enumerate(lines):
        for node, law in enumerate(line[2]):
            laws[row, node] = law
    ids = None
    if is_points:
        ids, laws = tokens.unsqueeze(2), torch.ones(rows, nodes, 1, dtype=torch.float64)
    elif as_ids:
        order = torch.randperm(vocab, generator=generator)
        ids, laws = order.expand_as(laws), laws[:, :, order]
    tree = DraftTree(
        tokens=tokens,
        parents=torch.tensor([line[1] for line in lines], dtype=torch.int64).view(rows, nodes),
        num_nodes=torch.randint(0, nodes + 1, (rows,), generator=generator),
        law_probs=laws,
        law_ids=ids,
    )
    edge = st.sampled_from([None, 0.0, ALMOST_ONE])
    accept = torch.rand(rows, nodes, generator=generator, dtype=torch.float64)
    following = torch.rand(rows, generator=generator, dtype=torch.float64)
    for values in (accept, following):
        forced = draw(edge)
        if forced is not None:
            values.fill_(forced)
    return Round(tree, torch.stack([line[3] for line in lines]), accept, following)


def chains(**options):
    return rounds(chain=True, **options)


def equal(a, b):
    return all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("path", "num_accepted", "next_token")
    )


EVERY_RULE = [(name, rule, rounds()) for name, rule in TREE_RULES.items()]
EVERY_RULE += [(f"{name}, chains", rule, chains()) for name, rule in CHAIN_RULES.items()]
every_rule = pytest.mark.parametrize(
    ("rule", "cases"),
    [case[1:] for case in EVERY_RULE],
    ids=[case[0] for case in EVERY_RULE],
)


@every_rule
def test_the_path_goes_from_the_anchor_over_nodes_that_count_and_nothing_impossible_comes_out(
    rule, cases
):
    @EXAMPLES
    @given(cases)
    def check(round_):
        verdict = round_.judge(rule)
        for row in range(len(verdict.path)):
            count = int(verdict.num_accepted[row])
            path = verdict.path[row].tolist()
            assert all(node == -1 for node in path[count:])
            at = -1
            for node in path[:count]:
                assert at < node < int(round_.tree.num_nodes[row])
                assert int(round_.tree.parents[row, node]) == at
                assert round_.probs[row, at + 1, round_.tree.tokens[row, node]] > 0
                at = node
            assert round_.probs[row, at + 1, verdict.next_token[row]] > 0

    check()


@every_rule
def test_rows_do_not_know_of_each_other(rule, cases):
    @EXAMPLES
    @given(cases, st.randoms(use_true_random=False))
    def check(round_, random):
        order = list(range(len(round_.following)))
        random.shuffle(order)
        whole = round_.judge(rule)
        shuffled = round_.take(torch.tensor(order)).judge(rule)
        for place, row in enumerate(order):
            alone = round_.take(torch.tensor([row])).judge(rule)
            for verdict, at in ((shuffled, place), (alone, 0)):
                assert torch.equal(verdict.path[at], whole.path[row])
                assert int(verdict.num_accepted[at]) == int(whole.num_accepted[row])
                assert int(verdict.next_token[at]) == int(whole.next_token[row])

    check()


@every_rule
def test_nodes_that_do_not_count_change_nothing(rule, cases):
    @EXAMPLES
    @given(cases, st.integers(0, 2))
    def check(round_, token):
        tree, rows = round_.tree, len(round_.following)
        column = torch.full((rows, 1), token)
        # below the node before it, so that a chain stays one
        parent = torch.full((rows, 1), tree.tokens.shape[1] - 1)
        law = torch.zeros(rows, 1, tree.law_probs.shape[2], dtype=torch.float64)
        law[:, :, 0] = 1.0
        ids = None
        if tree.law_ids is not None:
            fresh = torch.arange(law.shape[2]).expand_as(law)
            ids = torch.cat([tree.law_ids, fresh if law.shape[2] > 1 else column.unsqueeze(2)], 1)
        wider = DraftTree(
            torch.cat([tree.tokens, column], 1),
            torch.cat([tree.parents, parent], 1),
            tree.num_nodes,
            torch.cat([tree.law_probs, law], 1),
            ids,
        )
        probs = torch.cat([round_.probs, round_.probs[:, :1]], 1)
        accept = torch.cat([round_.accept, torch.zeros(rows, 1, dtype=torch.float64)], 1)
        verdict = Round(wider, probs, accept, round_.following).judge(rule)
        assert (verdict.path[:, -1] == -1).all()
        assert equal(replace(verdict, path=verdict.path[:, :-1]), round_.judge(rule))

    check()


@every_rule
def test_an_id_that_nobody_says_changes_nothing(rule, cases):
    @EXAMPLES
    @given(cases)
    def check(round_):
        tree = round_.tree
        probs = torch.cat([round_.probs, torch.zeros_like(round_.probs[:, :, :1])], 2)
        if tree.law_ids is None:
            laws = torch.cat([tree.law_probs, torch.zeros_like(tree.law_probs[:, :, :1])], 2)
            tree = replace(tree, law_probs=laws)
        wider = Round(tree, probs, round_.accept, round_.following)
        assert equal(wider.judge(rule), round_.judge(rule))

    check()


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_on_chains_smaller_uniforms_never_accept_less(rule):
    @EXAMPLES
    @given(chains(), st.floats(0, 1))
    def check(round_, factor):
        lower = Round(round_.tree, round_.probs, round_.accept * factor, round_.following)
        before = round_.judge(CHAIN_RULES[rule]).num_accepted
        assert (lower.judge(CHAIN_RULES[rule]).num_accepted >= before).all()

    check()


EXACT_ON_GREEDY = [(verify_speculative, rounds), (verify_speculative, chains)]
EXACT_ON_GREEDY += [(rule, chains) for rule in (verify_block, TREE_RULES["threshold"])]
EXACT_ON_GREEDY += [(TREE_RULES["typical"], rounds)]


@pytest.mark.parametrize(("rule", "cases"), EXACT_ON_GREEDY)
@pytest.mark.parametrize("points", [False, True])
def test_rows_whose_law_is_one_token_are_decoded_greedily(rule, cases, points):
    @EXAMPLES
    @given(cases(kinds=("point",), points=points))
    def check(round_):
        greedy = verify_exact_match(round_.tree, round_.probs.argmax(2))
        assert equal(round_.judge(rule), greedy)

    check()


@EXAMPLES
@given(rounds())
def test_exact_match_takes_the_longest_path_of_equal_tokens(round_):
    tree, ids = round_.tree, round_.probs.argmax(2)
    verdict = verify_exact_match(tree, ids)
    for row in range(len(ids)):
        depths, ends = [0], {0: int(ids[row, 0])}
        for node in range(int(tree.num_nodes[row])):
            parent = int(tree.parents[row, node])
            matches = depths[parent + 1] >= 0 and tree.tokens[row, node] == ids[row, parent + 1]
            depths.append(depths[parent + 1] + 1 if matches else -1)
            if matches and depths[-1] not in ends:
                ends[depths[-1]] = int(ids[row, node + 1])
        assert int(verdict.num_accepted[row]) == max(depths)
        assert int(verdict.next_token[row]) == ends[max(depths)]
