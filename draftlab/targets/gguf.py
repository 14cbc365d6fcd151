"""GGUF files as plain models: every weight dequantised once, nothing packed left behind."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draftlab.errors import UnsupportedTarget


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """Read a GGUF file's model, dequantised to `dtype`, and the tokenizer inside it.

    Raises:
        UnsupportedTarget: a file or architecture that transformers cannot read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
        )
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedTarget(
            f"cannot read {path} as a GGUF model: {str(error).rstrip('.')}; pass a .gguf file of a "
            "model, or convert yours to safetensors and use target=local"
        ) from None
    # what is left of the quantisation is a note; with it the model could not be saved again
    setattr(model, "hf_quantizer", None)  # noqa: B010 - not declared, yet there
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    return model, tokenizer
