"""What an EAGLE head remembers while it decodes, and how it drafts from that: chains and trees.

Position j of a head pairs the feature of position j with the embedding of token j + 1. Features are
the target's own for what was observed and the head's own output for what it drafts. What differs
between heads is their network, a `Feed`. Read observe, then propose_chain, then propose_tree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftlab.drafters._chain import Chain, largest_probability
from draftlab.drafters._eagle_layer import Branches, EagleLayer, LayerMatrices, NewPositions
from draftlab.drafters._growth import grow, num_expanded
from draftlab.drafters.base import DraftBudget, Observation
from draftlab.drafters.layers import LayerSizes
from draftlab.drafters.tree import DraftTree
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.packing import PackedLinear


@dataclass(slots=True)
class HeadMemory:
    """Sequences being drafted for. `committed` mirrors `lengths` on the host.

    Attributes:
        kv: keys and values by true features, slot = position; one slot more than `capacity`, where
            writes that count for nothing go, and behind it room for the nodes of a tree once trees
            are asked for.
        capacity: longest sequence, tokens.
        lengths: positions observed, per slot.
        committed: the same numbers as Python integers.
        hidden: what the head feeds back after the last observed position, per slot.
        logits: over the draft vocabulary, for the first draft token, per slot.
        ids: target id of every column of `logits`.
        cos: rotary table by position.
        sin: rotary table by position, through `signed_sin`.
        layers: matrices, one entry a layer.
        fc: makes the input of the layers.
        head: the LM head.
        window: positions a row may look back to, itself included; None means all.
    """

    kv: KVBuffers
    capacity: int
    lengths: Int[Tensor, " slots"]
    committed: list[int]
    hidden: Float[Tensor, "slots D"]
    logits: Float[Tensor, "slots C"]
    ids: Int[Tensor, " C"]
    cos: Tensor
    sin: Tensor
    layers: list[LayerMatrices]
    fc: PackedLinear
    head: PackedLinear
    window: int | None

    def reach(self, position: int) -> int:
        """Give the first slot that anything at a position, or after it, may look at."""
        return 0 if self.window is None else max(position - self.window + 1, 0)


# (memory, where, tokens [R W], features [R W D]) -> what is fed back [R Wo D], logits [R Wo C];
# Wo is 1 when `where.last` is given, else W
Feed = Callable[[HeadMemory, NewPositions, Tensor, Tensor], tuple[Tensor, Tensor]]


def open_memory(
    layers: Sequence[EagleLayer],
    *,
    slots: int,
    capacity: int,
    angles: tuple[Float[Tensor, "S Dr"], Float[Tensor, "S Dr"]],
    ids: Int[Tensor, " C"],
    fc: PackedLinear,
    head: PackedLinear,
    window: int | None = None,
) -> HeadMemory:
    """Make buffers and fused matrices, in the dtype of the layers.

    Args:
        layers: of the head.
        slots: sequences.
        capacity: longest sequence, tokens.
        angles: cos and signed sin of positions 0..capacity.
        ids: target id of every row of `head`.
        fc: makes the input of the layers.
        head: the LM head, without ids that are no tokens.
        window: positions a row may look back to, itself included; None means all.
    """
    weight = layers[0].self_attn.q_proj.weight
    dtype, device, sizes = weight.dtype, weight.device, layers[0].sizes
    return HeadMemory(
        kv=_buffers(len(layers), sizes, slots, capacity + 1, weight),
        capacity=capacity,
        lengths=torch.zeros(slots, dtype=torch.int64, device=device),
        committed=[0] * slots,
        hidden=torch.zeros(slots, sizes.hidden, dtype=dtype, device=device),
        logits=torch.zeros(slots, ids.shape[0], dtype=dtype, device=device),
        ids=ids,
        cos=angles[0].to(dtype),
        sin=angles[1].to(dtype),
        layers=[LayerMatrices.of(layer) for layer in layers],
        fc=fc,
        head=head,
        window=window,
    )


def observe(
    memory: HeadMemory, seen: Observation, features: Float[Tensor, "R W D"], feed: Feed
) -> None:
    """Write keys and values by true features; keep the last position's output for the drafts."""
    slots = seen.rows.tolist()
    counts = seen.lengths.tolist()
    if max(counts, default=0) == 0:
        return
    base = memory.lengths[seen.rows]
    columns = torch.arange(seen.ids.shape[1], device=base.device)
    first = memory.reach(min(memory.committed[slot] for slot in slots))
    for slot, count in zip(slots, counts, strict=True):
        memory.committed[slot] += count
    where = NewPositions(
        rows=seen.rows,
        positions=(base.unsqueeze(1) + columns).clamp_max(memory.capacity),
        live=max(memory.committed[slot] for slot in slots),
        is_prefix=_is_prefix(slots),
        is_level=False,
        last=(seen.lengths - 1).clamp_min(0),
        window=memory.window,
        first=first,
    )
    fed, logits = (x[:, 0] for x in feed(memory, where, seen.next_ids, features))
    has_new = (seen.lengths > 0).unsqueeze(1)
    memory.hidden[seen.rows] = torch.where(has_new, fed, memory.hidden[seen.rows])
    memory.logits[seen.rows] = torch.where(has_new, logits, memory.logits[seen.rows])
    memory.lengths[seen.rows] = base + seen.lengths


def propose_chain(
    memory: HeadMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"], feed: Feed
) -> DraftTree:
    """Draft a chain: the first token from what was observed, the others from own states.

    Own keys and values go past a row's length, where the next `observe` overwrites them. With
    `min_confidence` every node tells the draft's largest probability at its place, known before
    the token is drawn; drafting ends when no row is that sure.
    """
    rows, depth = budget.rows, budget.num_draft_tokens
    slots = rows.tolist()
    lengths = memory.lengths[rows]
    known = [memory.committed[slot] for slot in slots]
    is_prefix, is_level = _is_prefix(slots), len(set(known)) == 1
    hidden, logits = memory.hidden[rows].unsqueeze(1), memory.logits[rows].unsqueeze(1)
    chain = Chain(budget, uniforms, memory.ids)
    num_nodes = torch.where(lengths > 0, (memory.capacity - 1 - lengths).clamp(0, depth), 0)
    sure = torch.ones_like(num_nodes, dtype=torch.bool)
    confidence = []
    for k in range(depth):
        if k > 0:
            where = NewPositions(
                rows=rows,
                positions=(lengths + (k - 1)).clamp_max(memory.capacity).unsqueeze(1),
                live=min(max(known) + k, memory.capacity + 1),
                is_prefix=is_prefix,
                is_level=is_level,
                window=memory.window,
                first=memory.reach(min(min(known) + k - 1, memory.capacity)),
            )
            hidden, logits = feed(memory, where, chain.newest.unsqueeze(1), hidden)
        if budget.min_confidence is not None:
            confidence.append(largest_probability(logits, budget.sampling)[:, 0])
            sure = sure & (confidence[-1] >= budget.min_confidence)
            num_nodes = torch.where(sure, num_nodes, num_nodes.clamp_max(k))
            if k > 0 and not bool(sure.any()):
                confidence.pop()
                break
        chain.choose(logits[:, 0])
    return chain.finish(num_nodes, confidence)


def propose_tree(
    memory: HeadMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"], feed: Feed
) -> DraftTree:
    """Grow a tree; every level that has children is one pass.

    Nodes attend to what was observed and to their ancestors. Their keys and values go past a row's
    length, where the next `observe` overwrites them.
    """
    slots = budget.rows.tolist()
    known = [memory.committed[slot] for slot in slots]
    return grow_tree(
        memory,
        budget,
        uniforms,
        feed,
        longest=max(known),
        shortest=min(known),
        is_prefix=_is_prefix(slots),
    )


def grow_tree(
    memory: HeadMemory,
    budget: DraftBudget,
    uniforms: Float[Tensor, "R N"],
    feed: Feed,
    *,
    longest: int,
    shortest: int,
    is_prefix: bool,
) -> DraftTree:
    """Grow a tree for rows of which the host knows no more than this; see `propose_tree`.

    Args:
        memory: of all slots.
        budget: with a tree.
        uniforms: one a node.
        feed: see `Feed`.
        longest: no row has more committed positions.
        shortest: none has fewer.
        is_prefix: the rows are slots 0..R-1 in order.
    """
    assert budget.tree is not None
    rows = budget.rows
    lengths = memory.lengths[rows]
    count = num_expanded(budget.tree)
    _make_room(memory, memory.capacity + 1 + count)
    slots = torch.arange(count, device=rows.device)
    ancestors = torch.zeros(rows.shape[0], 1, count, dtype=torch.bool, device=rows.device)
    hidden, done, depth = memory.hidden[rows].unsqueeze(1), 0, 0
    levels: list[int] = []  # tree slot that each begins at

    def expand(columns: Tensor, parents: Tensor) -> Tensor:
        nonlocal ancestors, hidden, done, depth
        width = columns.shape[1]
        own = done + torch.arange(width, device=rows.device)
        ancestors = ancestors.gather(1, parents.unsqueeze(-1).expand(-1, -1, count))
        ancestors = ancestors | (slots == own.unsqueeze(1))
        levels.append(done)
        ancestors[..., : levels[memory.reach(depth)]].fill_(False)  # they left the window
        where = NewPositions(
            rows=rows,
            positions=(lengths + depth).clamp_max(memory.capacity).unsqueeze(1).expand(-1, width),
            live=longest + done + width,
            is_prefix=is_prefix,
            is_level=False,
            branches=Branches(lengths, done, ancestors),
            window=memory.window,
            first=min(memory.reach(shortest + depth), shortest),
        )
        before = hidden.gather(1, parents.unsqueeze(-1).expand(-1, -1, hidden.shape[2]))
        hidden, logits = feed(memory, where, memory.ids[columns], before)
        done, depth = done + width, depth + 1
        return logits

    return grow(
        budget,
        memory.logits[rows],
        expand,
        uniforms,
        law=budget.sampling.drafting,
        ids=memory.ids,
        is_live=lengths > 0,
    )


def close(memory: HeadMemory, rows: Int[Tensor, " R"]) -> None:
    """Forget these sequences; what lies in their buffers is past their length."""
    memory.lengths[rows] = 0
    for slot in rows.tolist():
        memory.committed[slot] = 0


def _is_prefix(slots: list[int]) -> bool:
    return slots == list(range(len(slots)))


def _make_room(memory: HeadMemory, capacity: int) -> None:
    """Lengthen the buffers, once a shape."""
    old = memory.kv
    if old.capacity >= capacity:
        return
    layers, _, slots, _, kv_heads, head_dim = old.data.shape
    memory.kv = KVBuffers(
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        slots=slots,
        capacity=capacity,
        dtype=old.data.dtype,
        device=old.data.device,
    )
    memory.kv.data[:, :, :, : old.capacity] = old.data


def _buffers(
    num_layers: int, sizes: LayerSizes, slots: int, capacity: int, like: Tensor
) -> KVBuffers:
    return KVBuffers(
        num_layers=num_layers,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        slots=slots,
        capacity=capacity,
        dtype=like.dtype,
        device=like.device,
    )
