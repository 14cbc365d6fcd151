"""What training a drafter on its own output needs, apart from the drafter.

Read unroll: depths see the past by true features and themselves by their own; how rows attend is in
_training_attention.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftlab.data.batch import TokenBatch
from draftlab.drafters._eagle_layer import EagleLayer
from draftlab.drafters._spans import Spans, past_spans
from draftlab.drafters._training_attention import attend_unrolled
from draftlab.drafters.layers import Angles
from draftlab.shapes import Bool, Float, Int, Tensor

Embed = Callable[[Tensor], Tensor]  # token ids to embeddings
Join = Callable[[Tensor, Tensor], Tensor]  # (embedding, feature) to what the first layer reads
# the last layer's output to (what is judged, what the next depth reads as its feature)
FeedBack = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class PickedRows:
    """Positions of a batch that are trained, packed to the left: A of T in every row.

    Attributes:
        index: position of each; filled up with positions that are not needed.
        place: where a position went, -1 when it was not picked.
    """

    index: Int[Tensor, "B A"]
    place: Int[Tensor, "B T"]

    @classmethod
    def pick(cls, needed: Bool[Tensor, "B T"]) -> "PickedRows":
        """Pick the needed positions of every row, at least one."""
        width = max(int(needed.sum(1).max()), 1)
        index = (~needed).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        place = torch.full(needed.shape, -1, dtype=torch.int64, device=needed.device)
        order = torch.arange(width, device=needed.device).expand_as(index)
        return cls(index, place.scatter_(1, index, order))

    def take(
        self, x: Float[Tensor, "B T *rest"] | Int[Tensor, "B T *rest"]
    ) -> Float[Tensor, "B A *rest"] | Int[Tensor, "B A *rest"]:
        """Gather the picked positions."""
        index = self.index.view(*self.index.shape, *[1] * (x.dim() - 2))
        return x.gather(1, index.expand(*self.index.shape, *x.shape[2:]))


def unroll(
    layers: Sequence[EagleLayer],
    batch: TokenBatch,
    features: Float[Tensor, "B T D"],
    rows: PickedRows,
    *,
    depths: int,
    embed: Embed,
    angles: Angles,
    join: Join,
    feed: FeedBack,
    window: int | None = None,
) -> list[Float[Tensor, "B A D"]]:
    """Run a head at every depth, each on what the one before fed back: as a draft does.

    Row t at depth s stands at position t + s, with the embedding of token t + 1 + s.

    Args:
        layers: of the head.
        batch: token rows.
        features: of the target, which depth 0 reads.
        rows: positions that some depth learns from; the others are there for their keys.
        depths: K.
        embed: see `Embed`.
        angles: see `Angles`.
        join: see `Join`.
        feed: see `FeedBack`.
        window: positions a row may look back to, itself included, at least K; None means all.

    Returns:
        What is judged, depth by depth, at the picked rows.
    """
    positions = rows.take(batch.positions)
    own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    spans = past_spans(batch.segment_ids, rows.index, window=window)

    embedded = embed(batch.shifted_ids(1))
    hidden, past = _first_depth(
        layers,
        batch,
        embedded,
        join(embedded, features),
        angles(batch.positions),
        spans,
        rows,
        window,
    )
    judged, fed = feed(hidden)
    states = [judged]
    for depth in range(1, depths):
        if window is not None:
            spans = past_spans(batch.segment_ids, rows.index, window=window, ahead=depth)
        embedded = embed(rows.take(batch.shifted_ids(1 + depth)))
        hidden, turn = join(embedded, fed), angles(positions + depth)
        for layer, (keys, values), mine in zip(layers, past, own, strict=True):
            x, residual = layer.read(embedded, hidden)
            mine.append(layer.keys_values(x, *turn))
            mixed = attend_unrolled(layer.queries(x, *turn), keys, values, spans, mine)
            hidden = layer.finish(mixed, residual)
        judged, fed = feed(hidden)
        states.append(judged)
    return states


def _first_depth(
    layers: Sequence[EagleLayer],
    batch: TokenBatch,
    embedded: Tensor,
    hidden: Tensor,
    angles: tuple[Tensor, Tensor],
    spans: Spans,
    rows: PickedRows,
    window: int | None,
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run depth 0: keys everywhere; the last layer's output at the picked rows only."""
    past = []
    full = None
    for i, layer in enumerate(layers):
        x, residual = layer.read(embedded, hidden)
        keys, values = layer.keys_values(x, *angles)
        past.append((keys, values))
        if i == len(layers) - 1:
            x, residual = rows.take(x), rows.take(residual)
            queries = layer.queries(x, rows.take(angles[0]), rows.take(angles[1]))
            mixed = attend_unrolled(queries, keys, values, spans, [])
        else:
            full = full or everywhere(batch, window)
            mixed = attend_unrolled(layer.queries(x, *angles), keys, values, full, [])
        hidden = layer.finish(mixed, residual)
    return hidden, past


def everywhere(batch: TokenBatch, window: int | None) -> Spans:
    """Let every position see its own sample up to itself, as far back as a window reaches."""
    order = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    return past_spans(batch.segment_ids, order.expand_as(batch.input_ids), window=window)


def sequence_sums(
    segment_ids: Int[Tensor, "B T"],
    rows: Int[Tensor, " N"],
    columns: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
) -> Float[Tensor, " N"]:
    """Give, for every prediction, the sum of the weights of its whole sequence."""
    stride = int(segment_ids.max()) + 1
    sequence = rows * stride + segment_ids[rows, columns]
    sums = weights.new_zeros(segment_ids.shape[0] * stride)
    return sums.index_add(0, sequence, weights)[sequence]
