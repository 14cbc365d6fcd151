"""Checking what lies on disk against a written table of names, shapes and dtypes.

An engine that finds another name drops the tensor or dies at load (case O-34), so an export is read
back and compared before anybody sees it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from draftlab.errors import NotExportable
from draftlab.shapes import Tensor

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class Row:
    """What a tensor of an export must look like."""

    shape: tuple[int, ...]
    dtype: str


def serving_dtype(dtype: torch.dtype) -> torch.dtype:
    """Choose the dtype of exported weights: the target's, but engines have no float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Give a dtype's name as configs spell it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def read_config(folder: Path) -> dict[str, Any]:
    """Read an exported config.json."""
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read an exported model.safetensors."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def check_tensors(tensors: Mapping[str, Tensor], table: Mapping[str, Row]) -> None:
    """Compare tensors with a table: nothing missing, nothing extra, every number finite.

    Raises:
        NotExportable: naming every tensor that differs.
    """
    problems = [f"{name} is missing" for name in sorted(set(table) - set(tensors))]
    problems += [f"{name} is not in the table" for name in sorted(set(tensors) - set(table))]
    for name in sorted(set(table) & set(tensors)):
        tensor, row = tensors[name], table[name]
        found = Row(tuple(tensor.shape), dtype_name(tensor.dtype))
        if found != row:
            problems.append(
                f"{name} is {found.dtype} {list(found.shape)}, expected {row.dtype} "
                f"{list(row.shape)}"
            )
        elif tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        raise NotExportable(
            f"the export does not match the format's table: {'; '.join(problems)}; nothing was "
            "written, the engine would refuse it or compute something else"
        )


def check_known(config: Mapping[str, Any], known: frozenset[str], engine: str) -> None:
    """Refuse switches that the writer does not hand on: the engine would run another network.

    Raises:
        NotExportable: naming them, and those that are missing.
    """
    unknown = {key: config[key] for key in sorted(set(config) - known)}
    if unknown:
        raise NotExportable(
            f"{engine} does not read {unknown}; without it the same weights would compute "
            "something else: train without it, or decode with draftlab"
        )
    if missing := sorted(known - set(config)):
        raise NotExportable(
            f"the drafter does not say {', '.join(missing)}, which {engine} must be told; it "
            "belongs into the config of its serving_weights"
        )
