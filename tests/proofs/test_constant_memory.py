"""Long answers: after 2,000 rounds as much is alive as after a few, to the byte.

A neural drafter, one that runs a model of its own, and one that looks things up; what drafting
leaves behind while it rests is looked at in tests/decoding/test_limits.py.
"""

import gc

import pytest
import torch
from contract_kit import make
from scripted import decode_settings

from draftlab.decoding.decoder import Decoder
from draftlab.targets.cache import KVBuffers
from draftlab.targets.tiny import tiny_target

ROUNDS = 2000
# a round holds more or less while it runs, as drafts come and go: the most of many is compared
EARLY, LATE = range(500, 508), range(1970, 1978)


def alive():
    """Count tensors, the bytes of their storages, each once, and KV memories."""
    gc.collect()
    things = gc.get_objects()
    tensors = [x for x in things if issubclass(type(x), torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    memories = sum(issubclass(type(x), KVBuffers) for x in things)
    return len(tensors), sum(storages.values()), memories


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["ngram", "eagle3", "draft_model"])
def test_2000_rounds_leave_nothing_behind(case):
    target = tiny_target(max_position_embeddings=4 * ROUNDS + 64)
    # nothing is drafted twice at this temperature, so a round gives little more than a token
    settings = decode_settings(temperature=20.0, num_draft_tokens=2)
    early, late, rounds = [], [], 0

    def count(*_):
        nonlocal rounds
        rounds += 1
        if rounds in EARLY:
            early.append(alive())
        if rounds in LATE:
            late.append(alive())

    Decoder(target, make(case, target), settings).generate(
        [[1, 2, 3]], max_new_tokens=4 * ROUNDS, on_tokens=count
    )
    assert rounds >= ROUNDS
    for before, after in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True):
        assert max(after) <= max(before)
    assert {memories for _, _, memories in early} == {memories for _, _, memories in late}
