"""Each exact rule leaves the joint law of whole sequences as it is: equality of fractions."""

import pytest
from rational_twin import (
    argmax_judged_as_drawn,
    autoregressive,
    block,
    drawn_tree,
    point_tree,
    sampled_verify,
    sequences,
    speculative,
    total_variation,
    toy_model,
)

LENGTH, DEPTH = 4, 2


EXACT = {
    "speculative": lambda p, q: speculative(p, q),
    "sampled verify": lambda p, q: sampled_verify(p, q, DEPTH),
    "block": lambda p, q: block(p, q),
    "tree of points": lambda p, q: point_tree(p, q, DEPTH, 2),
    "tree drawn without replacement": lambda p, q: drawn_tree(p, q, DEPTH, 2),
    "three drawn siblings": lambda p, q: drawn_tree(p, q, 1, 3),
}
BROKEN = {
    "argmax draft judged by q": lambda p, q: argmax_judged_as_drawn(p, q, DEPTH),
    "correction drawn from p": lambda p, q: speculative(p, q, after_rejection=lambda p, q: p),
    "fresh token at a mismatch": lambda p, q: sampled_verify(p, q, DEPTH, fresh=True),
    "block stopped at its first failure": lambda p, q: block(p, q, first_failure=True),
    "block with an unscaled residual": lambda p, q: block(p, q, scaled=False),
    "points judged as drawn": lambda p, q: point_tree(p, q, DEPTH, 2, judged_as_drawn=True),
    "siblings that forget each other": lambda p, q: drawn_tree(p, q, DEPTH, 2, forgets=True),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rule", EXACT)
def test_the_joint_law_of_sequences_is_the_targets_own(rule, seed, zeros):
    p, q = toy_model(f"p{seed}", zeros), toy_model(f"q{seed}", zeros)
    assert total_variation(sequences(EXACT[rule](p, q), LENGTH), autoregressive(p, LENGTH)) == 0


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_seen(rule):
    p, q = toy_model("p0"), toy_model("q0")
    assert (
        total_variation(sequences(BROKEN[rule](p, q), LENGTH), autoregressive(p, LENGTH)) > 0
    )  # fractions: any distance is a bug


def test_block_verification_accepts_more_than_token_level_verification():
    p, q = toy_model("p0"), toy_model("q0")

    def mean_length(round_law):
        return sum(len(tokens) * mass for tokens, mass in round_law(()).items())

    assert mean_length(EXACT["block"](p, q)) > mean_length(EXACT["speculative"](p, q))
