"""A chain of draft tokens chosen one after another, each from logits that know those before it.

Read Chain.
"""

from collections.abc import Sequence

import torch

from draftlab.drafters._growth import num_levels, temperature_of
from draftlab.drafters.base import DraftBudget
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError
from draftlab.sampling import Sampling, SamplingRows, draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor


class Chain:
    """The tokens chosen so far, and the laws they were drawn from."""

    def __init__(
        self, budget: DraftBudget, uniforms: Float[Tensor, "R N"], ids: Int[Tensor, " C"]
    ) -> None:
        """Begin without a token.

        Args:
            budget: how tokens are chosen.
            uniforms: one a token.
            ids: target id of every column of the logits.
        """
        self._law = budget.sampling.drafting if budget.draws else None
        self._uniforms = uniforms
        self._ids = ids
        self._tokens: list[Tensor] = []
        self._laws: list[Tensor] = []

    def choose(self, logits: Float[Tensor, "R C"]) -> Int[Tensor, " R"]:
        """Draw the next token, or take the likeliest; give its column."""
        if self._law is None:
            columns = greedy_ids(logits)
        else:
            law = process(logits, self._law)
            columns = draw(law, self._uniforms[:, len(self._tokens)])
            self._laws.append(law)
        self._tokens.append(self._ids[columns])
        return columns

    @property
    def newest(self) -> Int[Tensor, " R"]:
        """The target id of the token chosen last."""
        return self._tokens[-1]

    def finish(
        self, num_nodes: Int[Tensor, " R"], confidence: Sequence[Float[Tensor, " R"]] = ()
    ) -> DraftTree:
        """Give the chain.

        Args:
            num_nodes: nodes that count.
            confidence: of every token, or nothing; see `DraftTree`.
        """
        return as_chain(
            torch.stack(self._tokens, dim=1),
            torch.stack(self._laws, dim=1) if self._laws else None,
            self._ids,
            num_nodes,
            torch.stack(list(confidence), dim=1) if confidence else None,
        )


def as_chain(
    tokens: Int[Tensor, "R K"],
    probs: Float[Tensor, "R K C"] | None,
    ids: Int[Tensor, " C"],
    num_nodes: Int[Tensor, " R"],
    confidence: Float[Tensor, "R K"] | None,
) -> DraftTree:
    """Build a chain of drawn tokens, or of points where there are no laws.

    Args:
        tokens: target ids.
        probs: law each was drawn from, over `ids`; None when they are points.
        ids: target id of every column.
        num_nodes: nodes that count.
        confidence: see `DraftTree`.
    """
    if probs is None:
        points = chain_of_points(tokens)
        probs, support = points.law_probs, points.law_ids
    else:
        support = ids.expand(*tokens.shape, -1)
    parents = chain_parents(tokens.shape[0], tokens.shape[1], tokens.device)
    return DraftTree(tokens, parents, num_nodes, probs, support, confidence)


def largest_probability(
    logits: Float[Tensor, "R K C"], sampling: Sampling | SamplingRows
) -> Float[Tensor, "R K"]:
    """Compute the probability of the likeliest token, at the temperature of a row."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature_of(sampling)
    return (wide.max(-1).values - wide.logsumexp(-1)).exp()


def depth_of(budget: DraftBudget, deepest: int) -> int:
    """Give the draft tokens in a row that a proposal needs.

    Raises:
        ConfigError: more than a drafter has.
    """
    depth = budget.num_draft_tokens if budget.tree is None else num_levels(budget.tree)
    if depth > deepest:
        what = "num_draft_tokens" if budget.tree is None else "depth of the tree"
        raise ConfigError(
            f"{what}={depth} is more than the {deepest} draft tokens in a row that this drafter "
            "proposes; ask for at most that many"
        )
    return depth
