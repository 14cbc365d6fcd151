"""Heads for vLLM 0.32: config.json and model.safetensors in its native layout.

Read write, then check. The layouts stand in _eagle3.py and _medusa.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftlab.drafters.base import Drafter
from draftlab.errors import NotExportable
from draftlab.export._eagle3 import (
    check_vocab_map,
    eagle3_config,
    eagle3_limits,
    eagle3_table,
    eagle3_tensors,
)
from draftlab.export._medusa import (
    check_token_map,
    medusa_config,
    medusa_limits,
    medusa_table,
    medusa_tensors,
)
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


class VllmFormat(ExportFormat, name="vllm"):
    """EAGLE-3 and Medusa heads; the target brings embedding and tokenizer."""

    def write(
        self, drafter: Drafter, target: TargetView, folder: Path, history: Mapping[str, Any]
    ) -> Served:
        """Write config.json and model.safetensors."""
        serving = drafter.serving_weights()
        length = history.get("training_length")
        if serving.architecture == "eagle3":
            config = eagle3_config(serving, target, length)
            tensors = eagle3_tensors(serving, target)
            served = Served(
                architecture="eagle3",
                method="eagle3",
                library="vllm",
                about="An EAGLE-3 draft head (arXiv:2503.01840) of "
                f"{config['num_hidden_layers']} decoder layer(s) over the target's hidden states "
                f"after layers {config['eagle_aux_hidden_state_layer_ids']}.",
                limits=tuple(eagle3_limits(config, target, length)),
                max_draft_tokens=None,
            )
        elif serving.architecture == "medusa":
            config = medusa_config(serving, target)
            tensors = medusa_tensors(serving, config)
            served = Served(
                architecture="medusa",
                method="medusa",
                library="vllm",
                about=f"{config['num_heads']} Medusa heads (arXiv:2401.10774) over the target's "
                "final hidden state.",
                limits=tuple(medusa_limits(config)),
                max_draft_tokens=config["num_heads"],
            )
        else:
            raise NotExportable(
                f"export=vllm writes eagle3 and medusa heads, not {serving.architecture}; "
                + (
                    "export=hf writes a folder that vLLM serves as well"
                    if serving.architecture == "draft_model"
                    else "draftlab generate and draftlab eval decode with it"
                )
            )
        config["draftlab"] = {
            "base_model": target.spec.name,
            "base_model_checksum": target.spec.checksum,
            "tokenizer_sha256": target.spec.tokenizer_sha256,
            "layout": f"vllm-{serving.architecture}",
            "training_length": length,
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
        if config["model_type"] == "medusa":
            check_tensors(tensors, medusa_table(config))
            check_token_map(tensors, target)
        else:
            check_tensors(tensors, eagle3_table(config))
            check_vocab_map(tensors, target)


def _as_written(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    # a copy: safetensors refuses tensors that share memory
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone().contiguous()
