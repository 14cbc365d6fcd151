"""Which rule runs: what is asked for, what it needs, what it must not be combined with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from draftlab.decoding.rules.block import verify_block
from draftlab.decoding.rules.exact_match import verify_exact_match
from draftlab.decoding.rules.lossy import verify_lossy_threshold, verify_lossy_typical
from draftlab.decoding.rules.speculative import verify_speculative
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.errors import ConfigError
from draftlab.shapes import Float, Tensor

RuleName = Literal[
    "auto",
    "exact_match",
    "speculative",
    "sampled_verify",
    "block",
    "point_mass",
    "without_replacement",
    "typical",
    "threshold",
]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that has been chosen.

    Attributes:
        name: never "auto".
        reads: "ids": call `verify(tree, target_ids)` with the target's argmax ids when greedy, with
            ids drawn from p when sampled; "probs": call `verify(tree, target_probs,
            accept_uniforms=..., next_uniforms=...)`.
        points: ask the drafter for its likeliest tokens, each law a point mass
            (`DraftBudget.points`).
        is_lossy: the output does not have the target's law, and every report must say LOSSY.
        verify: the rule.
    """

    name: RuleName
    reads: Literal["ids", "probs"]
    points: bool
    is_lossy: bool
    verify: Callable[..., Verdict]


def choose_rule(
    name: RuleName,
    *,
    greedy: bool,
    tree: bool,
    draws: bool,
    lossy: bool,
    epsilon: float | None = None,
    delta: float | None = None,
    threshold: float | None = None,
) -> Rule:
    """Choose the rule for a way of decoding; auto takes the best exact one.

    Args:
        name: what is asked for.
        greedy: every row is decoded at temperature 0.
        tree: the drafter proposes trees.
        draws: the drafter draws its tokens from its own law when the target is sampled, and is not
            told to propose the likeliest ones.
        lossy: lossy rules are allowed.
        epsilon: of `typical`, in (0, 1).
        delta: of `typical`, in (0, 1).
        threshold: of `threshold`, in (0, 1).

    Raises:
        ConfigError: the rule does not go with the rest, or a value that it does not read.
    """
    if name == "auto":
        name = _best_exact(greedy=greedy, tree=tree, draws=draws)
    is_lossy = name in ("typical", "threshold")
    _check_sampling(name, greedy)
    _check_proposal(name, tree=tree, draws=draws)
    if is_lossy != lossy:
        raise ConfigError(
            f"decode.rule={name} with decode.lossy={str(lossy).lower()}: "
            + (
                "this rule changes the output's law; decode.lossy=true allows it, or "
                "decode.rule=auto takes an exact rule"
                if is_lossy
                else "this rule is exact, so there is nothing to allow; only typical and threshold "
                "are lossy"
            )
        )
    limits = _limits(name, {"epsilon": epsilon, "delta": delta, "threshold": threshold})
    if name in ("exact_match", "sampled_verify"):
        points = name == "sampled_verify" and not draws
        return Rule(name, "ids", points, is_lossy=False, verify=verify_exact_match)
    points = name == "point_mass" or not draws
    if is_lossy:
        judge = verify_lossy_typical if name == "typical" else verify_lossy_threshold
        return Rule(name, "probs", points, is_lossy=True, verify=_ignore_accepts(judge, limits))
    verify = verify_block if name == "block" else verify_speculative
    return Rule(name, "probs", points, is_lossy=False, verify=verify)


def _best_exact(*, greedy: bool, tree: bool, draws: bool) -> RuleName:
    if greedy:
        return "exact_match"
    if not draws:
        return "point_mass"
    return "without_replacement" if tree else "block"


def _check_sampling(name: RuleName, greedy: bool) -> None:
    if greedy != (name == "exact_match"):
        raise ConfigError(
            f"decode.rule={name} at temperature {'0' if greedy else 'above 0'}: exact_match is for "
            "temperature 0, every other rule for more; decode.rule=auto chooses"
        )


def _check_proposal(name: RuleName, *, tree: bool, draws: bool) -> None:
    if name == "block" and tree:
        raise ConfigError(
            "decode.rule=block judges chains, and the drafter proposes trees; expected "
            "without_replacement, point_mass or sampled_verify; decode.rule=auto chooses"
        )
    if name == "without_replacement" and not (tree and draws):
        raise ConfigError(
            "decode.rule=without_replacement is for trees whose siblings are drawn, and the "
            f"drafter {'proposes its likeliest tokens' if tree else 'proposes chains'}; "
            "decode.rule=auto chooses"
        )


def _limits(name: RuleName, given: dict[str, float | None]) -> dict[str, float]:
    """Take the numbers that a lossy rule reads, and refuse those that nothing reads."""
    wanted = {"typical": ("epsilon", "delta"), "threshold": ("threshold",)}.get(name, ())
    for key, value in given.items():
        if key not in wanted and value is not None:
            raise ConfigError(
                f"{key}={value} is not read by decode.rule={name}; expected null there"
            )
    taken: dict[str, float] = {}
    for key in wanted:
        value = given[key]
        if value is None or not 0 < value < 1:
            raise ConfigError(f"decode.rule={name} needs {key} in (0, 1), and it is {value}")
        taken[key] = value
    return taken


def _ignore_accepts(
    judge: Callable[..., Verdict], limits: dict[str, float]
) -> Callable[..., Verdict]:
    """Give a rule without chance the arguments of the others."""

    def verify(
        tree: DraftTree,
        target_probs: Float[Tensor, "R M V"],
        *,
        accept_uniforms: Float[Tensor, "R N"],
        next_uniforms: Float[Tensor, " R"],
    ) -> Verdict:
        return judge(tree, target_probs, next_uniforms=next_uniforms, **limits)

    return verify
