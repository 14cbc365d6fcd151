"""What block drafters hand to export. Read backbone_config."""

from typing import Any

from draftlab.drafters._block_backbone import BlockBackbone
from draftlab.drafters._frozen_head import FrozenHead
from draftlab.shapes import Tensor


def backbone_tensors(backbone: BlockBackbone) -> dict[str, Tensor]:
    """Name the backbone's tensors as all engines do; `mask_embedding` only where it is learned."""
    return {name: tensor.detach() for name, tensor in backbone.state_dict().items()}


def backbone_config(backbone: BlockBackbone, head: FrozenHead) -> dict[str, Any]:
    """Give sizes and switches that change the computation; taps are counted as our taps are."""
    choices, sizes, target = backbone.choices, backbone.sizes, backbone.target
    return {
        "hidden_size": sizes.hidden,
        "target_hidden_size": target.spec.hidden_size,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": choices.num_layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "rope_parameters": target.config.get("rope_parameters")
        or {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": target.spec.max_positions,
        "vocab_size": target.spec.vocab_size,
        "draft_vocab_size": head.size,
        "num_target_layers": target.spec.num_layers,
        "tap_layers": list(backbone.needs.tap_layers),
        "block_size": choices.block_size,
        "causal": choices.causal,
        "sliding_window": choices.sliding_window,
        "mask_token_id": choices.mask_token_id,
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
