"""Models that the fast door serves, small: family and sizes, as `tiny_target` takes them."""

MIXED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAST_FAMILIES = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "qwen3 with a window in half its layers": ("qwen3", MIXED_WINDOWS),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "a key head for every query head": ("llama", {"num_key_value_heads": 4}),
}
