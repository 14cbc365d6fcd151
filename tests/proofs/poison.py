"""Fills dead memory between rounds with numbers that would show if anything looked at them.

Two kinds of dead slots. Those no pass reads at all (of empty slots, and past the furthest position
that attention is given) take NaN. Those that are read and masked away cannot: attention multiplies
them by an exact 0, and 0 * NaN is NaN with every backend; they take a number that is huge, and
finite, so that 0 times it is 0. `KVBuffers` starts with zeros for the same reason.
"""

import torch

from draftlab.drafters._own_memory import OwnMemory
from draftlab.targets.cache import KVBuffers

HUGE = 1e30


def spoil(kv, lengths, reach):
    """Spoil what lies past each slot's length.

    Args:
        kv: buffers.
        lengths: valid positions of each slot; None is an empty slot, which nothing reads.
        reach: positions from 0 that the next passes may be given to read.
    """
    with torch.inference_mode():
        for slot, length in enumerate(lengths):
            if length is None:
                kv.data[:, :, slot] = torch.nan
            else:
                kv.data[:, :, slot, length:reach] = HUGE
                kv.data[:, :, slot, max(length, reach) :] = torch.nan


def quieten(kv):
    """Turn NaN into huge numbers, before rows may enter slots that hold them."""
    with torch.inference_mode():
        kv.data.nan_to_num_(nan=HUGE, posinf=HUGE, neginf=-HUGE)


def own_memories(state, target_kv):
    """Find every buffer of its own in a drafter's state, with the function that gives its lengths.

    A memory of another make is an error: whoever adds one says here how far it is valid.
    """
    found, seen, todo = [], {id(target_kv)}, [state]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(
            thing, torch.Tensor | torch.nn.Module | str | int | float
        ):
            continue
        seen.add(id(thing))
        if isinstance(thing, KVBuffers):
            raise AssertionError(f"whose lengths go with this memory? {thing} in {type(state)}")
        parts = parts_of(thing)
        for kv in [part for part in parts if isinstance(part, KVBuffers)]:
            if kv is not target_kv:
                seen.add(id(kv))
                found.append((kv, lengths_of(thing)))
        todo += parts
    return found


def parts_of(thing):
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, list | tuple):
        return list(thing)
    if not type(thing).__module__.startswith(("draftlab", "toy")):
        return []
    names = list(getattr(thing, "__dict__", ()))
    for kind in type(thing).__mro__:
        names += [name for name in getattr(kind, "__slots__", ()) if hasattr(thing, name)]
    return [getattr(thing, name) for name in names]


def lengths_of(owner):
    if isinstance(owner, OwnMemory):
        return lambda: [len(text.written) for text in owner.texts]
    for name in ("lengths", "_lengths"):
        if hasattr(owner, name):
            return lambda: getattr(owner, name).tolist()
    raise AssertionError(f"{type(owner)} has a memory and no lengths; see poison.lengths_of")
