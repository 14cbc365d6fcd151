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
FROM, TO = 500, 1990  # by then every buffer that grows in steps has grown


def alive():
    """Count tensors, the bytes of their storages, each once, and KV memories."""
    gc.collect()
    things = gc.get_objects()
    tensors = [x for x in things if issubclass(type(x), torch.Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    memories = sum(issubclass(type(x), KVBuffers) for x in things)
    return len(tensors), sum(storages.values()), memories


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ngram", "eagle3", "draft_model", "medusa"])
def test_2000_rounds_leave_nothing_behind(case):
    target = tiny_target(max_position_embeddings=4 * ROUNDS + 64)
    # nothing is drafted twice at this temperature, so a round gives little more than a token
    settings = decode_settings(temperature=20.0, num_draft_tokens=2)
    seen, rounds = {}, 0

    def count(*_):
        nonlocal rounds
        rounds += 1
        if rounds in (FROM, TO):
            seen[rounds] = alive()

    Decoder(target, make(case, target), settings).generate(
        [[1, 2, 3]], max_new_tokens=2 * ROUNDS, on_tokens=count
    )
    assert rounds >= ROUNDS
    tensors, size, memories = seen[FROM]
    # a round's own tensors may still be held by the interpreter when it is looked at
    assert abs(seen[TO][0] - tensors) <= 4
    assert abs(seen[TO][1] - size) <= 4096
    assert seen[TO][2] == memories >= 1
