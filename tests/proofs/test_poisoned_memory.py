"""Dead memory is dead: whatever lies there between rounds, drafts and answers stay the same.

Compared are the answers, what was accepted, and every logit and every draft's law on the way.
"""

from functools import partial

import pytest
import torch
from contract_kit import CASES, KINDS, K, make, some_ids
from scripted import decode_settings
from test_lossless_decoding import make_narrow_target
from toy_drafters import TOYS

from draftlab.decoding.decoder import Decoder
from draftlab.targets.tiny import tiny_target
from proofs.poison import own_memories, quieten, spoil

# slots are refilled while others run; 4 words make accepted runs of every length likely
PROMPTS = [[i % 4 for i in some_ids(n, seed=n)] for n in (9, 2, 17, 1, 12)]
LIMITS = [8, 12, 4, 10, 6]
FAST_FIRST = [pytest.param(case, marks=[pytest.mark.slow] * ("-" in case)) for case in CASES]
FORK = {"kind": "static", "shape": [2, 2, 1]}


@pytest.fixture(scope="module")
def target():
    return make_narrow_target()


class Traced:
    """A run of the decoder, with everything that was computed on the way."""

    def __init__(self, target, drafter, spoils=None, heat=2.0, **changes):
        """Decode; with `spoils`, spoil dead memory before every round."""
        depth = {} if changes.get("tree") or drafter is None else {"num_draft_tokens": K}
        settings = decode_settings(temperature=heat, **changes, **depth)
        self.decoder = Decoder(target, drafter, settings)
        self.numbers = []
        self.judged = self.decoder._judge.judge
        self.decoder._judge.judge = self._judge
        if spoils is not None:
            self.decoder._round = partial(self._round, spoils, self.decoder._round)
        found = self.decoder.generate(PROMPTS, max_new_tokens=LIMITS, batch_size=3)
        self.answers = [g.output_ids for g in found]
        self.accepted = [(s.num_drafted, s.num_accepted) for g in found for s in g.steps]

    def _judge(self, batch, tree, logits, depths):
        self.numbers.append(logits.clone())
        if tree is not None:
            counts = torch.arange(tree.tokens.shape[1]) < tree.num_nodes.unsqueeze(1)
            self.numbers += [tree.tokens[counts], tree.law_probs[counts]]
        return self.judged(batch, tree, logits, depths)

    def _round(self, spoils, honest, batch, on_tokens):
        live = {row.slot: row.base for row in batch.live}
        reach = max(live.values()) + 1 + self.decoder.plan.num_nodes
        spoils(batch.kv, [live.get(slot) for slot in range(batch.kv.slots)], reach)
        for kv, lengths in own_memories(batch.state, batch.kv):
            known = [n if slot in live else None for slot, n in enumerate(lengths())]
            # a drafter may write, and so read, a few columns more than it has nodes
            spoils(kv, known, reach + 64)
        finished = honest(batch, on_tokens)
        for kv, _ in [(batch.kv, None), *own_memories(batch.state, batch.kv)]:
            quieten(kv)
        return finished


def assert_same(spoiled, clean):
    assert spoiled.answers == clean.answers
    assert spoiled.accepted == clean.accepted
    for mine, theirs in zip(spoiled.numbers, clean.numbers, strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("heat", [0.0, 2.0], ids=["greedy", "sampled"])
def test_plain_decoding_never_sees_past_a_rows_end(target, heat):
    clean = Traced(target, None, heat=heat)
    assert_same(Traced(target, None, spoil, heat=heat), clean)


@pytest.mark.parametrize("case", FAST_FIRST)
def test_a_drafter_never_sees_past_a_rows_end(target, case):
    drafter = make(case, target)
    assert_same(Traced(target, drafter, spoil), Traced(target, drafter))


@pytest.mark.parametrize("case", [*KINDS, *TOYS])
def test_a_tree_never_sees_past_a_rows_end(target, case):
    drafter = make(case, target)
    if not drafter.grows_trees:
        pytest.skip("proposes chains")
    assert_same(Traced(target, drafter, spoil, tree=FORK), Traced(target, drafter, tree=FORK))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gpt2"])
def test_windows_caps_and_sinks_never_see_past_a_rows_end(family):
    target = tiny_target(family)
    drafter = make("medusa", target)
    assert_same(Traced(target, drafter, spoil), Traced(target, drafter))


def one_too_many(kv, lengths, reach):
    spoil(kv, [n - 1 if n else n for n in lengths], reach)


@pytest.mark.parametrize("case", [None, "draft_model", "eagle3"])
def test_one_slot_too_many_would_show(target, case):
    """The negative control: the newest valid slot counts as dead."""
    drafter = None if case is None else make(case, target)
    clean = Traced(target, drafter)
    with pytest.raises(AssertionError):
        assert_same(Traced(target, drafter, one_too_many), clean)
