"""After the verdict: what the host learns of it, and the accepted path shown to who reads along.

In: a `Verdict`. Out: an `Outcome` in Python numbers, fetched at once; observations. A chain's
accepted path is its first columns; a tree's is picked out of its columns.
"""

from dataclasses import dataclass

import torch

from draftlab.decoding.batch import Batch
from draftlab.decoding.watching import Watchers
from draftlab.drafters.tree import DraftTree, Verdict
from draftlab.shapes import Int, Tensor
from draftlab.targets.features import TargetFeatures


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict on the host.

    Attributes:
        counts: accepted draft tokens of each row.
        runs: accepted draft tokens and the next token of each row.
        drafts: draft tokens that were verified.
        has_jumps: some accepted path is not the first columns of its tree.
    """

    counts: list[int]
    runs: list[list[int]]
    drafts: list[int]
    has_jumps: bool

    @property
    def deepest(self) -> int:
        """Length of the longest accepted path."""
        return max(self.counts)


def fetch_outcome(tree: DraftTree | None, verdict: Verdict) -> Outcome:
    """Bring a verdict to the host in one transfer."""
    if tree is None:
        tokens: list[int] = verdict.next_token.tolist()
        none = [0] * len(tokens)
        return Outcome(none, [[token] for token in tokens], none, has_jumps=False)
    width = tree.tokens.shape[1]
    facts = torch.cat(
        [
            torch.stack([verdict.num_accepted, tree.num_nodes, verdict.next_token], dim=1),
            tree.tokens,
            verdict.path,
        ],
        dim=1,
    )
    counts, runs, drafts, has_jumps = [], [], [], False
    for count, num_nodes, next_token, *rest in facts.tolist():
        path = rest[width : width + count]
        counts.append(count)
        drafts.append(num_nodes)
        runs.append([*(rest[node] for node in path), next_token])
        has_jumps = has_jumps or path != list(range(count))
    return Outcome(counts, runs, drafts, has_jumps)


def show_path(
    watchers: Watchers,
    batch: Batch,
    ids: Int[Tensor, "R T"],
    verdict: Verdict,
    outcome: Outcome,
    features: TargetFeatures,
    defers: bool,
) -> None:
    """Show the anchor and the accepted nodes of every live row.

    Args:
        watchers: who reads along; with nobody there, nothing is done.
        batch: the live rows, as they were verified.
        ids: anchor and draft nodes.
        verdict: on the device.
        outcome: the same on the host.
        features: of the columns of `ids`.
        defers: the drafter is resting.
    """
    if not watchers.are_there:
        return
    width = outcome.deepest + 1
    next_ids = verdict.next_token.unsqueeze(1)
    if width == 1:
        ids, features = ids[:, :1], _first_columns(features, 1)
    else:
        if outcome.has_jumps:
            ids, features = take_path(ids, features, verdict.path[:, : width - 1])
        else:
            ids, features = ids[:, :width], _first_columns(features, width)
        # the token after each position; after the last accepted one comes the next token
        next_ids = torch.cat([ids[:, 1:], next_ids], dim=1).scatter(
            1, verdict.num_accepted.unsqueeze(1), next_ids
        )
    watchers.show(
        batch.state,
        [row.prompt_index for row in batch.live],
        batch.slots,
        ids,
        verdict.num_accepted + 1,
        next_ids,
        features,
        defers=defers,
    )


def take_path(
    ids: Int[Tensor, "R T"], features: TargetFeatures, path: Int[Tensor, "R K"]
) -> tuple[Int[Tensor, "R W"], TargetFeatures]:
    """Give the anchor's column and those of a path, side by side; W = K + 1.

    Args:
        ids: anchor and draft nodes.
        features: of these columns.
        path: nodes, padded with -1; padding gives the anchor's column again.
    """
    picked = torch.cat([torch.zeros_like(path[:, :1]), path + 1], dim=1)
    return ids.gather(1, picked), _pick_columns(features, picked)


def _first_columns(features: TargetFeatures, width: int) -> TargetFeatures:
    taps, final = features.taps, features.final
    return TargetFeatures(
        None if taps is None else taps[:, :width],
        None if final is None else final[:, :width],
    )


def _pick_columns(features: TargetFeatures, picked: Int[Tensor, "R W"]) -> TargetFeatures:
    row = torch.arange(picked.shape[0], device=picked.device).unsqueeze(1)
    taps, final = features.taps, features.final
    return TargetFeatures(
        None if taps is None else taps[row, picked],
        None if final is None else final[row, picked],
    )
