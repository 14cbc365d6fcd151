"""Heads for vLLM 0.32: config.json and model.safetensors in its native layout.

Read write, then check. The layouts stand in _eagle3.py, _medusa.py and their like.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftlab.drafters.base import Drafter
from draftlab.errors import NotExportable
from draftlab.export._dflash import DFLASH
from draftlab.export._dspark import DSPARK
from draftlab.export._eagle import EAGLE
from draftlab.export._eagle3 import EAGLE3
from draftlab.export._layout import Layout
from draftlab.export._medusa import MEDUSA
from draftlab.export._mtp import MTP
from draftlab.export._peagle import PEAGLE
from draftlab.export.base import ExportFormat, Served
from draftlab.export.table import (
    CONFIG,
    WEIGHTS,
    check_tensors,
    read_config,
    read_tensors,
    serving_dtype,
)
from draftlab.shapes import Tensor
from draftlab.targets.view import TargetView

_LAYOUTS: dict[str, Layout] = {
    "dflash": DFLASH,
    "dspark": DSPARK,
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "medusa": MEDUSA,
    "mtp": MTP,
    "peagle": PEAGLE,
}


class VllmFormat(ExportFormat, name="vllm"):
    """Heads on the target's hidden states; the target brings embedding and tokenizer."""

    def write(
        self, drafter: Drafter, target: TargetView, folder: Path, history: Mapping[str, Any]
    ) -> Served:
        """Write config.json and model.safetensors."""
        serving = drafter.serving_weights()
        length = history.get("training_length")
        layout = _layout(serving.architecture)
        config = layout.config(serving, target, length)
        tensors = layout.tensors(serving, target, config)
        served = Served(
            architecture=serving.architecture,
            method=layout.method,
            library="vllm",
            about=layout.about(config),
            limits=tuple(layout.limits(config, target, length)),
            max_draft_tokens=layout.most_drafts(config),
            options=layout.options,
            overrides=layout.overrides,
        )
        config["draftlab"] = {
            "base_model": target.spec.name,
            "base_model_checksum": target.spec.checksum,
            "tokenizer_sha256": target.spec.tokenizer_sha256,
            "layout": f"vllm-{serving.architecture}",
            "training_length": length,
            "checkpoint": history.get("checkpoint"),
        }
        dtype = serving_dtype(target.dtype)
        save_file(
            {name: _as_written(tensor, dtype) for name, tensor in tensors.items()},
            folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        return served

    def check(self, folder: Path, target: TargetView) -> None:
        """Compare what was written with the layout's table, from the files alone."""
        config, tensors = read_config(folder), read_tensors(folder)
        layout = _layout(config["draftlab"]["layout"].removeprefix("vllm-"))
        check_tensors(tensors, layout.table(config))
        layout.check_ids(tensors, target)


def _layout(architecture: str) -> Layout:
    if architecture not in _LAYOUTS:
        raise NotExportable(
            f"export=vllm writes {', '.join(_LAYOUTS)} heads, not {architecture}; "
            + (
                "export=hf writes a folder that vLLM serves as well"
                if architecture == "draft_model"
                else "draftlab generate and draftlab eval decode with it"
            )
        )
    return _LAYOUTS[architecture]


def _as_written(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    # a copy: safetensors refuses tensors that share memory
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone().contiguous()
