"""What is drafted in a round: how deep, of what shape, and where a draft is cut.

In: the live rows. Out: a `DraftTree`, or None for a plain round. Read Proposer.propose.

Non-anticipation (decoder hazard H9): whether a drawn token is verified may depend on everything
drawn before it, and never on the token itself. Chains are cut by `confidence`, which drafters tell
before they draw; how far a chain goes is decided node by node, in order; and a tree, whose shape
depends on all of its nodes at once, is grown of the likeliest tokens, with nothing drawn at all.
"""

from dataclasses import replace

import torch

from draftlab.decoding import crossing
from draftlab.decoding.batch import Batch
from draftlab.decoding.costs import TimeCurve
from draftlab.decoding.fallback import Fallback
from draftlab.decoding.geometry import path_confidence
from draftlab.decoding.plan import DraftPlan
from draftlab.drafters.base import DraftBudget, Drafter
from draftlab.drafters.tree import DraftTree
from draftlab.errors import ConfigError, ShapeMismatch
from draftlab.randomness import Purpose
from draftlab.shapes import Bool, Float, Int, Tensor


class Proposer:
    """Asks the drafter for drafts that fit, or for none."""

    def __init__(
        self,
        drafter: Drafter | None,
        plan: DraftPlan,
        *,
        min_confidence: float | None,
        fallback: Fallback | None,
    ) -> None:
        """Choose what every proposal has in common.

        Args:
            drafter: None proposes nothing, ever.
            plan: depth and shape.
            min_confidence: chains end before a node below it; None cuts nothing.
            fallback: says when drafting does not pay; None always drafts.
        """
        self._drafter = drafter
        self._plan = plan
        self._min_confidence = min_confidence
        self._fallback = fallback
        # how many columns count is known to the device; asking a GPU costs more than they do
        self._trims = min_confidence is not None or plan.is_budgeted
        self.curve: TimeCurve | None = None

    @property
    def is_resting(self) -> bool:
        """True while drafting does not pay."""
        return self._fallback is not None and not self._fallback.wants_draft

    def propose(self, batch: Batch, *, wants_points: bool) -> DraftTree | None:
        """Draft for every live row that still has room in its answer.

        Args:
            batch: the live rows.
            wants_points: the rule is for deterministic drafts.
        """
        allowed = [row.may_draft for row in batch.live]
        depth = min(self._plan.depth, max(allowed))
        if self._drafter is None or depth == 0:
            return None
        shape = self._plan.shape
        asked = self._min_confidence
        if asked is None and self._plan.is_budgeted:
            asked = 0.0  # cuts nothing, but asks for an opinion
        budget = DraftBudget(
            rows=batch.slots,
            num_draft_tokens=depth,
            sampling=batch.draft_laws,
            points=wants_points,
            tree=shape,
            min_confidence=asked,
        )
        count = depth if shape is None else self._plan.num_nodes
        uniforms = batch.uniforms(Purpose.DRAFT, count)
        tree = crossing.propose(self._drafter, batch.state, budget, uniforms)
        if tree.tokens.shape[1] > count:  # there is no memory for more
            raise ShapeMismatch(
                f"a {self._drafter.kind} drafter proposed {tree.tokens.shape[1]} nodes a row; "
                f"it was asked for {count} at most"
            )
        if shape is None:
            return self._fit_chain(batch, tree, allowed, may_look_ahead=not budget.draws)
        if min(allowed) == 0:
            rows = batch.ints([int(room > 0) for room in allowed])
            tree = replace(tree, num_nodes=tree.num_nodes * rows)
        return self._spend(tree) if self._plan.is_budgeted else tree

    def _fit_chain(
        self, batch: Batch, tree: DraftTree, allowed: list[int], *, may_look_ahead: bool
    ) -> DraftTree | None:
        """Cut chains to their answers' room and to what is worth its time; drop empty columns."""
        width, num_nodes = tree.tokens.shape[1], tree.num_nodes
        if min(allowed) < width:
            num_nodes = torch.minimum(num_nodes, batch.ints(allowed))
        if self._min_confidence is not None:
            sure = self._confidence_of(tree) >= self._min_confidence
            num_nodes = torch.minimum(num_nodes, sure.long().cumprod(1).sum(1))
        if self._plan.is_budgeted and width:
            counts = batch.columns(width) < num_nodes.unsqueeze(1)
            path = torch.where(counts, self._confidence_of(tree).cumprod(1), 0.0)
            length = self._best_size(path, may_look_ahead=may_look_ahead)
            num_nodes = num_nodes.clamp_max(length)
        used = width
        if width and (self._trims or num_nodes.device.type == "cpu"):
            # columns that count for no row are not worth the target's time
            used = int(num_nodes.max())
        if used == 0:
            return None
        if used == width and num_nodes is tree.num_nodes:
            return tree
        return take_columns(tree, slice(used), num_nodes)

    def _spend(self, tree: DraftTree) -> DraftTree | None:
        """Keep as many of a tree's surest nodes as promise most tokens a second."""
        counts = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
        alive = counts < tree.num_nodes.unsqueeze(1)
        path = path_confidence(tree.parents, self._confidence_of(tree), depth=self._plan.depth)
        path = torch.where(alive, path, 0.0)
        ordered, order = path.sort(dim=1, descending=True, stable=True)
        size = self._best_size(ordered, may_look_ahead=True)
        if size == 0:
            return None
        # a parent is never less sure than its child and comes first among equals, so what is kept
        # is a tree; in order of index its parents precede their children again
        kept = order[:, :size].sort(dim=1).values
        return _keep_nodes(tree, kept, alive.gather(1, kept))

    def _best_size(self, path: Float[Tensor, "R N"], *, may_look_ahead: bool) -> int:
        """Choose how many nodes a row to verify, by expected tokens a second.

        Args:
            path: chance of acceptance of each node, in the order they would be taken.
            may_look_ahead: False for drawn chains: the answer is then the first length that one
                more node does not improve, told without a look at the nodes behind it.
        """
        curve = self.curve
        assert curve is not None, "a budgeted plan has its curve measured before the first round"
        rows, most = path.shape
        gains: list[float] = path.sum(0).tolist()
        best, best_rate, tokens = 0, rows / curve.at(1), float(rows)
        for size, gain in enumerate(gains, start=1):
            tokens += gain
            rate = tokens / curve.at(size + 1)
            if rate > best_rate:
                best, best_rate = size, rate
            elif not may_look_ahead:
                break
        return min(best, most)

    def _confidence_of(self, tree: DraftTree) -> Float[Tensor, "R N"]:
        if tree.confidence is None:
            kind = "" if self._drafter is None else self._drafter.kind
            key = "tree: budgeted" if self._plan.is_budgeted else "min_confidence"
            raise ConfigError(
                f"decode.{key} has no effect with a {kind} drafter: it does not tell how sure it "
                "is; pass null"
            )
        return tree.confidence


def take_columns(tree: DraftTree, columns: slice, num_nodes: Int[Tensor, " R"]) -> DraftTree:
    """Give a tree of the first nodes only."""
    return DraftTree(
        tokens=tree.tokens[:, columns],
        parents=tree.parents[:, columns],
        num_nodes=num_nodes,
        law_probs=tree.law_probs[:, columns],
        law_ids=None if tree.law_ids is None else tree.law_ids[:, columns],
        confidence=None if tree.confidence is None else tree.confidence[:, columns],
    )


def _keep_nodes(
    tree: DraftTree, kept: Int[Tensor, "R Nk"], alive: Bool[Tensor, "R Nk"]
) -> DraftTree:
    """Give a tree of some of the nodes, closed under parents, in order of index."""
    rows, count = tree.tokens.shape
    place = torch.full((rows, count + 1), -1, dtype=torch.int64, device=kept.device)
    places = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    place.scatter_(1, kept + 1, places)
    row = torch.arange(rows, device=kept.device).unsqueeze(1)
    return DraftTree(
        tokens=tree.tokens.gather(1, kept),
        parents=place.gather(1, tree.parents.gather(1, kept) + 1),
        num_nodes=alive.sum(1),
        law_probs=tree.law_probs[row, kept],
        law_ids=None if tree.law_ids is None else tree.law_ids[row, kept],
        confidence=None if tree.confidence is None else tree.confidence.gather(1, kept),
    )
