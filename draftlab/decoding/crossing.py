"""Calls to a drafter that may live on another device than its target.

In: what the decoder has, on the target's device. Out: what the drafter gives, on the same one. On
one device nothing is touched. The drafter's state stays where the drafter is.
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from draftlab.drafters.base import DraftBudget, Drafter, Observation
from draftlab.drafters.tree import DraftTree
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.view import TargetView

T = TypeVar("T")


def device_of(drafter: Drafter, here: torch.device) -> torch.device:
    """Tell where a drafter lives; one that keeps no view of its target lives anywhere."""
    view: TargetView | None = getattr(drafter, "target", None)
    return here if view is None else view.device


def observe(drafter: Drafter, state: Any, seen: Observation) -> None:
    """Show a drafter processed positions."""
    here = seen.rows.device
    drafter.observe(state, _moved(seen, here, device_of(drafter, here)))


def propose(
    drafter: Drafter, state: Any, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
) -> DraftTree:
    """Ask a drafter for a proposal."""
    here = budget.rows.device
    there = device_of(drafter, here)
    tree = drafter.propose(state, _moved(budget, here, there), uniforms.to(there))
    return _moved(tree, there, here)


def close(drafter: Drafter, state: Any, rows: Int[Tensor, " R"]) -> None:
    """Empty slots of a drafter."""
    drafter.close(state, rows.to(device_of(drafter, rows.device)))


def _moved(item: T, here: torch.device, there: torch.device) -> T:
    return item if here == there else _move(item, there)


def _move(item: Any, device: torch.device) -> Any:
    """Move the tensors of plain data, however deep they lie."""
    if isinstance(item, Tensor):
        return item.to(device)
    if is_dataclass(item) and not isinstance(item, type):
        parts = {field.name: getattr(item, field.name) for field in fields(item)}
        moved = {name: _move(part, device) for name, part in parts.items()}
        changed = {name: part for name, part in moved.items() if part is not parts[name]}
        return replace(item, **changed) if changed else item
    return item
