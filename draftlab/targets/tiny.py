"""Random targets small enough for tests, and a byte tokenizer: nothing is downloaded.

Read tiny_target first. Any family of `TINY_FAMILIES` has the sizes of a toy and the code of the
real thing.
"""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from draftlab.errors import ConfigError
from draftlab.targets.target import Target, build_target

_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + ((call.function or call) | tojson) + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# what differs from the shared sizes, by family
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mistral": {"sliding_window": 8},
    "gpt2": {},
    "gpt_oss": {
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
TINY_FAMILIES = tuple(_FAMILIES)

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.14,
    "tie_word_embeddings": False,
}
_GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.14,
    "tie_word_embeddings": False,
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte tokenizer of 261 ids with ChatML markers; answers end with <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(_MARKERS),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any
) -> PreTrainedModel:
    """Build a random causal language model whose next-token laws are peaked.

    Args:
        family: one of `TINY_FAMILIES`.
        dtype: of the weights.
        seed: of the weights; the global generator is left as it was.
        **sizes: entries of the transformers config to set or replace.

    Raises:
        ConfigError: an unknown family.
    """
    if family not in _FAMILIES:
        raise ConfigError(f"unknown tiny family {family!r}; known: {', '.join(TINY_FAMILIES)}")
    entries = dict(_GPT2_SIZES if family == "gpt2" else _SIZES) | _FAMILIES[family] | sizes
    layer_types = entries.get("layer_types")
    if layer_types is not None and "layer_types" not in sizes:
        entries["layer_types"] = layer_types[: entries["num_hidden_layers"]]
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        entries.pop("model_type", family),
        **entries,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    # the grouped matmul of experts refuses float64, and sinks need the plain attention
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager" if family == "gpt_oss" else "sdpa"
        )
    model = model.to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(6.0)
    return model.eval()


def tiny_target(
    family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any
) -> Target:
    """Build a tiny model and its tokenizer into a target.

    Args:
        family: one of `TINY_FAMILIES`.
        dtype: of the weights; float64 makes greedy decoding exact to the token.
        seed: of the weights.
        **sizes: entries of the transformers config to set or replace.
    """
    model = build_tiny_model(family, dtype, seed, **sizes)
    return build_target(model, tiny_tokenizer(), name=f"tiny-{family}", source="tiny")
