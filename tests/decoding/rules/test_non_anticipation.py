"""What decides how much of a draft is verified must not have seen it (non-anticipation).

Equality of fractions over whole sequences; the same on the shipped code is in test_shipped_law.py.
"""

from fractions import Fraction

import pytest
from rational_twin import (
    autoregressive,
    block,
    drawn_tree,
    sequences,
    speculative,
    total_variation,
    toy_model,
)

LENGTH = 4
SEEDS = range(3)
CHAIN_RULES = {"speculative": speculative, "block": block}


def models(seed):
    return toy_model(f"p{seed}"), toy_model(f"q{seed}")


def distance(round_law, p):
    return total_variation(sequences(round_law, LENGTH), autoregressive(p, LENGTH))


def sure(law):
    return max(law) >= Fraction(1, 2)


def likely(draft, x):
    return draft[x] >= Fraction(2, 5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_cutting_where_the_drafter_is_unsure_keeps_the_law(rule, seed):
    p, q = models(seed)

    def more(prefix, drafted):
        return len(drafted) < 3 and sure(q(prefix + drafted))

    assert distance(CHAIN_RULES[rule](p, q, more), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_stopping_after_an_unlikely_token_that_is_still_verified_keeps_the_law(rule, seed):
    p, q = models(seed)

    def more(prefix, drafted):
        if not drafted:
            return True
        before = q(prefix + drafted[:-1])
        return len(drafted) < 3 and likely(before, drafted[-1])

    assert distance(CHAIN_RULES[rule](p, q, more), p) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_dropping_a_token_because_it_is_unlikely_is_biased(rule, seed):
    p, q = models(seed)
    assert distance(CHAIN_RULES[rule](p, q, keeps=likely), p) > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_drawing_fewer_siblings_where_the_drafter_is_sure_keeps_the_law(seed):
    p, q = models(seed)
    tree = drawn_tree(p, q, 2, 2, keep=lambda law, drawn: drawn[:1] if sure(law) else drawn)
    assert distance(tree, p) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_keeping_the_likeliest_of_drawn_siblings_is_biased(seed):
    p, q = models(seed)

    def rerank(law, drawn):
        return tuple(x for x in drawn if likely(law, x))

    assert distance(drawn_tree(p, q, 2, 2, keep=rerank), p) > 0
