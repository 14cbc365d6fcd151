"""One pass of the target over new positions of some rows, and what comes out of it."""

from dataclasses import dataclass, replace

import torch

from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.features import TargetFeatures


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens of R rows and where they go: prompt chunks, tokens, chains, trees, packed rows.

    Column t of a row is written to slot base + t. Columns that do not count (right padding of a
    chunk, unused draft nodes) are computed and written like the others; nothing that counts can
    see them, and the next pass overwrites them.

    Attributes:
        rows: slots, unique.
        ids: T new tokens a row.
        base: committed length of each row, tokens: position of column 0.
        live: slots from 0 that any row may look at: at least max(base) + T.
        depths: position of a column relative to `base`; None is the chain 0..T-1.
        ancestors: True where column i may see column j (itself included); None is the chain.
        segments: for packed rows, which fill fresh memory (`base` is 0): sample of every column, -1
            for padding. A sample's columns follow one another, as do their positions. A column sees
            its own sample up to itself, padding only itself. Not together with `ancestors`.
        is_prefix: whether `rows` is 0..R-1 in order, where the host knows; None looks.
    """

    rows: Int[Tensor, " R"]
    ids: Int[Tensor, "R T"]
    base: Int[Tensor, " R"]
    live: int
    depths: Int[Tensor, "R T"] | None = None
    ancestors: Bool[Tensor, "R T T"] | None = None
    segments: Int[Tensor, "R T"] | None = None
    is_prefix: bool | None = None

    def __post_init__(self) -> None:
        """Hold packed rows to what their attention takes for granted."""
        if self.segments is None:
            return
        assert self.ancestors is None, "columns see by samples or by a tree, not by both"
        assert self.live == self.ids.shape[1], "packed rows see their own columns alone"
        if self.base.device.type == "cpu":  # of another device, the host would have to ask
            assert not self.base.any(), "packed rows fill fresh memory"

    @property
    def columns(self) -> Int[Tensor, " T"]:
        """0..T-1."""
        return torch.arange(self.ids.shape[1], device=self.ids.device)

    @property
    def positions(self) -> Int[Tensor, "R T"]:
        """Position of every column, as RoPE sees it."""
        depths = self.columns if self.depths is None else self.depths
        return self.base.unsqueeze(1) + depths

    @property
    def slots(self) -> Int[Tensor, "R T"]:
        """KV slot of every column."""
        return self.base.unsqueeze(1) + self.columns

    def within(self, max_positions: int) -> "Step":
        """Keep every position inside the target's table.

        Only dummies, and drafts that can no longer enter an answer, lie past it.
        """
        if self.live <= max_positions:
            return self
        limit = (max_positions - 1 - self.base).unsqueeze(1)
        depths = self.columns if self.depths is None else self.depths
        return replace(self, depths=torch.minimum(depths, limit))

    def visible(self, window: int | None) -> Bool[Tensor, "R T S"]:
        """True where a column may look at a slot; S = live.

        Args:
            window: sliding window of the layer in tokens (a column sees positions greater than its
                own minus `window`), or None.
        """
        slot = torch.arange(self.live, device=self.ids.device)
        base = self.base.view(-1, 1, 1)
        offset = slot - base  # [R, 1, S]: column that a slot of this pass belongs to
        t = self.ids.shape[1]
        if self.ancestors is None:
            seen = offset <= self.columns.view(1, -1, 1)
        else:
            inside = (offset >= 0) & (offset < t)
            index = offset.clamp(0, t - 1).expand(-1, t, -1)
            seen = (offset < 0) | (inside & self.ancestors.gather(2, index))
        if self.segments is not None:
            own = self.segments.unsqueeze(2)
            itself = offset == self.columns.view(1, -1, 1)
            seen = seen & (self.segments.unsqueeze(1) == own) & ((own >= 0) | itself)
        if window is not None:
            depths = self.columns.expand_as(self.ids) if self.depths is None else self.depths
            depth_of_slot = torch.where(
                (offset >= 0) & (offset < t),
                depths.unsqueeze(1).gather(2, offset.clamp(0, t - 1)),
                offset,
            )
            seen = seen & (depth_of_slot > depths.unsqueeze(2) - window)
        return seen


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a target pass gives.

    Attributes:
        logits: for every column, after the model's own scaling and caps; None when not asked for.
        features: hidden states as requested.
    """

    logits: Float[Tensor, "R T V"] | None
    features: TargetFeatures
