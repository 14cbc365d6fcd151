"""What the target says of a draft: which nodes stay, and the token after them.

In: logits of a pass over the anchor and the draft nodes. Out: a `Verdict`. The rules themselves are
pure and stand in `rules/`; here they get the target's law p and their random numbers.
"""

from collections.abc import Sequence

from draftlab.decoding.batch import Batch
from draftlab.decoding.settings import DecodeSettings
from draftlab.decoding.verify import Rule, choose_rule, compute_overlaps
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.randomness import Purpose
from draftlab.sampling import Sampling, TokenContext, adjust, draw, greedy_ids, process
from draftlab.shapes import Float, Int, Tensor


class Judge:
    """Holds the rule for greedy rows, and the one for batches in which something is drawn."""

    def __init__(
        self, settings: DecodeSettings, *, has_drafter: bool, is_tree: bool, draws: bool
    ) -> None:
        """Choose the rules that the settings name.

        Args:
            settings: name the rule and its limits.
            has_drafter: False is plain decoding: greedy, or drawn by place in the answer.
            is_tree: drafts have branches.
            draws: the drafter draws its tokens when the target is sampled.

        Raises:
            ConfigError: a rule that the sampling or the draft's shape makes meaningless.
        """
        self._settings = settings
        self._has_drafter = has_drafter
        self._is_tree = is_tree
        self._draws = draws
        self._greedy = choose_rule(
            "exact_match", greedy=True, tree=is_tree, draws=draws, lossy=False
        )
        self._sampled = self._greedy
        self.prepare([settings.sampling])

    def prepare(self, laws: Sequence[Sampling]) -> None:
        """Choose anew for rows sampled by these laws; greedy ones among them stay greedy.

        Raises:
            ConfigError: the settings' rule is not for laws like these.
        """
        settings = self._settings
        is_greedy = all(law.is_greedy for law in laws)
        if self._has_drafter:
            self._sampled = choose_rule(
                settings.rule,
                greedy=is_greedy,
                tree=self._is_tree,
                draws=self._draws,
                lossy=settings.lossy,
                epsilon=settings.lossy_epsilon,
                delta=settings.lossy_delta,
                threshold=settings.lossy_threshold,
            )
        elif not is_greedy:
            self._sampled = choose_rule(
                "sampled_verify", greedy=False, tree=False, draws=True, lossy=False
            )

    @property
    def rule(self) -> Rule:
        """The rule of the rows that were prepared for."""
        return self._sampled

    @property
    def is_lossy(self) -> bool:
        """True when the output does not have the target's law."""
        return self._sampled.is_lossy

    @property
    def wants_points(self) -> bool:
        """True when the rule is for deterministic drafts."""
        return self._sampled.points

    def judge(
        self,
        batch: Batch,
        tree: DraftTree | None,
        logits: Float[Tensor, "R T V"],
        depths: Int[Tensor, "R T"] | None,
    ) -> tuple[Verdict, Float[Tensor, "R T V"] | None]:
        """Decide for every live row.

        Args:
            batch: the live rows.
            tree: their drafts, or None for a plain round.
            logits: after the anchor (column 0) and after each node.
            depths: of the columns; None is a chain.

        Returns:
            The verdict, and p where it was computed.
        """
        context = self._context(batch, tree)
        if batch.is_greedy:
            ids = greedy_ids(adjust(logits, batch.laws, context))
            return self._after_ids(batch, self._greedy, tree, ids), None
        rule = self._sampled
        probs = process(logits, batch.laws, context)
        if rule.reads == "ids":
            # keyed by the place in the answer: the same numbers whether or not drafts are used
            places = batch.columns(probs.shape[1]).unsqueeze(0) if depths is None else depths
            ids = draw(probs, batch.uniforms_by_place(places))
            return self._after_ids(batch, rule, tree, ids), probs
        next_uniforms = batch.uniforms(Purpose.RESAMPLE, 1).squeeze(1)
        if tree is None:
            return batch.nothing_accepted(draw(probs[:, 0], next_uniforms)), probs
        verdict = rule.verify(
            tree,
            probs,
            accept_uniforms=batch.uniforms(Purpose.ACCEPT, tree.tokens.shape[1]),
            next_uniforms=next_uniforms,
        )
        return verdict, probs

    def _after_ids(
        self, batch: Batch, rule: Rule, tree: DraftTree | None, ids: Int[Tensor, "R T"]
    ) -> Verdict:
        return batch.nothing_accepted(ids[:, 0]) if tree is None else rule.verify(tree, ids)

    def _context(self, batch: Batch, tree: DraftTree | None) -> TokenContext | None:
        if batch.context is None:
            return None
        slots = [row.slot for row in batch.live]
        if tree is None:
            return batch.context.at(slots)
        return batch.context.at(slots, tree.tokens, tree.parents)


def list_overlaps(
    tree: DraftTree | None, probs: Float[Tensor, "R T V"] | None, *, rows: int
) -> list[list[float]]:
    """List sum over v of min(p, q) at every node of a chain; nothing where nothing was drawn."""
    if tree is None or probs is None:
        return [[] for _ in range(rows)]
    return compute_overlaps(tree, probs).tolist()
