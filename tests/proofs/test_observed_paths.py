"""What a drafter remembers after any history of rounds is what a fresh prefill would tell it.

tests/contract takes one row through two rounds. Here ragged rows share a state for many rounds:
pieces of any length, none for some, garbage in the padding, proposals of every shape in between,
rows that leave and enter.
"""

import random

import pytest
import torch
from contract_kit import CASES, K, Session, assert_same_trees, make, some_ids

from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.tree import DynamicTree, StaticTree
from draftlab.randomness import uniforms
from draftlab.sampling import GREEDY, Sampling
from draftlab.targets.step import Step
from draftlab.targets.tiny import tiny_target

ROWS = 4
SAMPLED = Sampling(temperature=1.0)
STATIC = StaticTree(parents=(-1, -1, 0, 0, 1), ranks=(0, 1, 0, 1, 0))
DYNAMIC = DynamicTree(num_nodes=6, top_k=2, depth=3)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


class Shared(Session):
    """A state of several rows that moves on all rows at once, as the decoder does."""

    def show_all(self, rows, pieces, anchors, noise):
        """Show a piece of each row, padded on the right with whatever `noise` says."""
        width = max(len(piece) for piece in pieces)
        lengths = torch.tensor([len(piece) for piece in pieces])
        ids = torch.randint(200, (len(rows), width), generator=noise)
        partners = torch.randint(200, (len(rows), width), generator=noise)
        for r, (piece, anchor) in enumerate(zip(pieces, anchors, strict=True)):
            following = [*piece[1:], anchor][: len(piece)]
            ids[r, : len(piece)], partners[r, : len(piece)] = (
                torch.tensor(piece, dtype=torch.int64),
                torch.tensor(following, dtype=torch.int64),
            )
        base = torch.tensor([self.lengths[row] for row in rows])
        slots = torch.tensor(rows)
        step = Step(slots, ids, base, live=int(base.max()) + width)
        features = self.target.run(
            self.kv, step, request=self.drafter.needs, wants_logits=False
        ).features
        padding = torch.arange(width) >= lengths.unsqueeze(1)
        taps, final = features.taps, features.final
        if taps is not None:
            taps = taps.masked_fill(padding.view(*padding.shape, 1, 1), 1e4)
        if final is not None:
            final = final.masked_fill(padding.unsqueeze(2), 1e4)
        with torch.inference_mode():
            seen = Observation(slots, ids, lengths, partners, taps, final)
            self.drafter.observe(self.state, seen)
        for row, piece in zip(rows, pieces, strict=True):
            self.lengths[row] += len(piece)

    def draft(self, rows, sampling, tree=None):
        count = K if tree is None else max(len(getattr(tree, "parents", ())), 6)
        draws = uniforms(7, torch.arange(len(rows)).unsqueeze(1), torch.arange(count))
        budget = DraftBudget(torch.tensor(rows), K, sampling, tree=tree)
        with torch.inference_mode():
            return self.drafter.propose(self.state, budget, draws)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * ("-" in case)) for case in CASES]
)
def test_any_history_of_rounds_equals_a_fresh_prefill(target, case):
    drafter = make(case, target)
    shapes = [None, STATIC, DYNAMIC] if drafter.grows_trees else [None]
    choose, noise = random.Random(5), torch.Generator().manual_seed(5)
    shared = Shared(target, drafter, ROWS)
    texts = {row: some_ids(60, seed=row) for row in range(ROWS)}
    for turn in range(10):
        moving = sorted(choose.sample(range(ROWS), choose.randint(1, ROWS)))
        # what accepted paths give (1..K+1), what prompts give, and nothing
        pieces = {row: choose.choice([0, 1, 1, 2, K + 1, 7]) for row in moving}
        pieces[choose.choice(moving)] = choose.randint(1, K + 1)
        rows = [row for row in moving if shared.lengths[row] + pieces[row] < 59]
        if not any(pieces[row] for row in rows):
            continue
        spans = {row: slice(shared.lengths[row], shared.lengths[row] + pieces[row]) for row in rows}
        shared.show_all(
            rows,
            [texts[row][spans[row]] for row in rows],
            [texts[row][spans[row].stop] for row in rows],
            noise,
        )
        known = [row for row in range(ROWS) if shared.lengths[row]]
        shared.draft(known, choose.choice([GREEDY, SAMPLED]), choose.choice(shapes))
        if turn == 5:
            leaving = choose.choice(known)
            shared.close(leaving)
            texts[leaving] = some_ids(60, seed=9)
    known = [row for row in range(ROWS) if shared.lengths[row]]
    assert len(known) >= 2
    for row in known:
        length = shared.lengths[row]
        fresh = Shared(target, drafter, 1)
        fresh.show(0, texts[row][:length], texts[row][length])
        for sampling in (GREEDY, SAMPLED):
            for shape in shapes:
                mine = shared.draft([row], sampling, shape)
                assert_same_trees(mine, fresh.draft([0], sampling, shape))
                assert torch.equal(mine.parents, fresh.draft([0], sampling, shape).parents)
