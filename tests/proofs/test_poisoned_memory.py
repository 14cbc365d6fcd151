"""Dead memory is dead: whatever lies there between rounds, drafts and answers stay the same."""

import pytest
from contract_kit import CASES, KINDS, K, make, some_ids
from scripted import decode_settings
from test_lossless_decoding import make_narrow_target
from toy_drafters import TOYS

from draftlab.decoding.decoder import Decoder
from draftlab.targets.tiny import tiny_target
from proofs.poison import own_memories, quieten, spoil

# slots are refilled while others run; 4 words make accepted runs of every length likely
PROMPTS = [[i % 4 for i in some_ids(n, seed=n)] for n in (9, 2, 17, 1, 12, 5)]
LIMITS = [9, 14, 5, 12, 7, 10]
FORK = {"kind": "static", "shape": [2, 2, 1]}


@pytest.fixture(scope="module")
def target():
    return make_narrow_target()


def answers(target, drafter, *, poisoned, heat=0.0, **changes):
    depth = {} if changes.get("tree") or drafter is None else {"num_draft_tokens": K}
    settings = decode_settings(temperature=heat, **changes, **depth)
    decoder = Decoder(target, drafter, settings)
    if poisoned:
        honest = decoder._round

        def round_over_poison(batch, on_tokens):
            live = {row.slot: row.base for row in batch.live}
            reach = max(live.values()) + 1 + decoder.plan.num_nodes
            spoil(batch.kv, [live.get(slot) for slot in range(batch.kv.slots)], reach)
            for kv, lengths in own_memories(batch.state, batch.kv):
                known = [n if slot in live else None for slot, n in enumerate(lengths())]
                # a drafter may write, and so read, a few columns more than it has nodes
                spoil(kv, known, reach + 64)
            finished = honest(batch, on_tokens)
            for kv, _ in [(batch.kv, None), *own_memories(batch.state, batch.kv)]:
                quieten(kv)
            return finished

        decoder._round = round_over_poison
    found = decoder.generate(PROMPTS, max_new_tokens=LIMITS, batch_size=3)
    return [(g.output_ids, [(s.num_drafted, s.num_accepted) for s in g.steps]) for g in found]


@pytest.mark.parametrize("heat", [0.0, 1.0], ids=["greedy", "sampled"])
def test_plain_decoding_never_sees_past_a_rows_end(target, heat):
    clean = answers(target, None, poisoned=False, heat=heat)
    assert answers(target, None, poisoned=True, heat=heat) == clean


@pytest.mark.parametrize("case", CASES)
def test_a_drafter_never_sees_past_a_rows_end(target, case):
    drafter = make(case, target)
    clean = answers(target, drafter, poisoned=False, heat=1.0)
    assert answers(target, drafter, poisoned=True, heat=1.0) == clean


@pytest.mark.parametrize("case", [*KINDS, *TOYS])
def test_a_tree_never_sees_past_a_rows_end(target, case):
    drafter = make(case, target)
    if not drafter.grows_trees:
        pytest.skip("proposes chains")
    clean = answers(target, drafter, poisoned=False, heat=1.0, tree=FORK)
    assert answers(target, drafter, poisoned=True, heat=1.0, tree=FORK) == clean


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gpt2"])
def test_windows_caps_and_sinks_never_see_past_a_rows_end(family):
    target = tiny_target(family)
    drafter = make("medusa", target)
    clean = answers(target, drafter, poisoned=False)
    assert answers(target, drafter, poisoned=True) == clean


def test_one_slot_too_many_would_show(target, monkeypatch):
    """The negative control: the newest committed slot counts as dead."""
    spoil = globals()["spoil"]
    clean = answers(target, None, poisoned=False)

    def one_too_many(kv, lengths, reach):
        spoil(kv, [n - 1 if n else n for n in lengths], reach)

    monkeypatch.setitem(globals(), "spoil", one_too_many)
    assert answers(target, None, poisoned=True) != clean
