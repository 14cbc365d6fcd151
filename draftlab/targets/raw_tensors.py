"""Tensors of a checkpoint by their names in the file, also those that transformers drops.

In: where a model was loaded from. Out: only what is asked for is read, never the whole checkpoint.
"""

import json
from pathlib import Path

from safetensors import safe_open
from transformers.utils import cached_file

from draftlab.shapes import Tensor

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_raw_tensors(place: str, revision: str | None, prefix: str) -> dict[str, Tensor]:
    """Read the tensors whose names begin with a prefix; none where there are no safetensors.

    Args:
        place: folder or hub id; what transformers downloaded before is read, nothing new.
        revision: commit of a hub model; None for a folder.
        prefix: such as "model.mtp_layers.0.".
    """
    if (index := _find(place, revision, _INDEX)) is not None:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({file for name, file in files.items() if name.startswith(prefix)})
        paths = [_find(place, revision, shard) for shard in shards]
    else:
        paths = [_find(place, revision, _WHOLE)]
    found: dict[str, Tensor] = {}
    for path in paths:
        if path is None:
            continue
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if name.startswith(prefix):
                    found[name] = file.get_tensor(name)
    return found


def _find(place: str, revision: str | None, name: str) -> Path | None:
    if Path(place).is_dir():
        path = Path(place) / name
        return path if path.is_file() else None
    try:
        found = cached_file(place, name, revision=revision, local_files_only=True)
    except OSError:  # not in the cache: a tiny or dequantised model has no such file at all
        return None
    return None if found is None else Path(found)
