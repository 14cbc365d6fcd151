"""What a drafter may use of the frozen target: read-only, by reference, never trained or saved."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.spec import TargetSpec
from draftlab.targets.step import Step


class TargetView(ABC):
    """Read-only window on a target. Nothing obtained here may be written.

    Attributes:
        spec: identity and sizes.
        tokenizer: the target's Hugging Face tokenizer.
        config: the decoder's sizes and switches as plain data, the names of a transformers config:
            hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, head_dim,
            rms_norm_eps, hidden_act, rope_parameters (dict with rope_theta, rope_type, ...),
            max_position_embeddings, model_type, tie_word_embeddings, ...
        device: where the target's weights are.
        dtype: of the target's weights.
    """

    spec: TargetSpec
    tokenizer: Any
    config: dict[str, Any]
    device: torch.device
    dtype: torch.dtype

    @abstractmethod
    def embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        """Embed token ids exactly as the target does (its scale included)."""

    @abstractmethod
    def head(self, final: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """Compute the target's logits from final hidden states (its scale and cap included)."""

    @abstractmethod
    def head_rows(self, ids: Int[Tensor, " C"] | None) -> Float[Tensor, "C D"]:
        """Give rows of the LM-head matrix: a copy of those named, or the whole matrix itself."""

    @abstractmethod
    def final_norm(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Apply the target's final norm: tap num_layers becomes the LM head's input."""

    @abstractmethod
    def rope(
        self, positions: Int[Tensor, "*N"]
    ) -> tuple[Float[Tensor, "*N Dr"], Float[Tensor, "*N Dr"]]:
        """Compute cos and sin (rotate-half layout, scaling included), float32, Dr = rotary width.

        Raises:
            UnsupportedTarget: the target has no rotary positions.
        """

    @abstractmethod
    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Give one decoder layer's weights by their names inside the layer, 0-based.

        Names as in Llama: self_attn.q_proj.weight, mlp.gate_proj.weight, input_layernorm.weight.
        """

    @abstractmethod
    def raw_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Read tensors of the checkpoint by the beginning of their names, as they are stored.

        Also what transformers drops, such as multi-token prediction modules; empty where the target
        came from no safetensors.
        """

    @abstractmethod
    def run_layers(
        self, kv: KVBuffers, step: Step, layers: tuple[int, ...]
    ) -> Float[Tensor, "R T D"]:
        """Run new tokens through some decoder layers only, for self-speculation.

        Writes these layers' keys and values at the step's slots, which verification overwrites.

        Returns:
            The residual stream after the last of them, before the final norm.
        """
