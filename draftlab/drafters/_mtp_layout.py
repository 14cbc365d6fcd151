"""Where the tensors of a multi-token prediction module lie in a target's checkpoint.

MiMo (and vLLM's class for it) keeps one module a depth under `model.mtp_layers.{i}.`; a module that
is applied again and again is number 0. Names inside, ours on the right:

    token_layernorm, hidden_layernorm         embedding_norm, hidden_norm
    input_proj [D, 2D], the hidden state first   eh_proj, with hidden_first=true
    input_layernorm, self_attn.*, post_attention_layernorm, mlp.*   layer.*, alike
    final_layernorm                           norm
"""

from collections.abc import Mapping

from draftlab.errors import ConfigError
from draftlab.shapes import Tensor

MIMO_PREFIX = "model.mtp_layers.0."
_RENAMED = {
    "token_layernorm.weight": "embedding_norm.weight",
    "hidden_layernorm.weight": "hidden_norm.weight",
    "input_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "norm.weight",
}


def from_mimo(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of module 0, full names as in the checkpoint, to ours."""
    found = {}
    for name, tensor in tensors.items():
        inner = name.removeprefix(MIMO_PREFIX)
        found[_RENAMED.get(inner, f"layer.{inner}")] = tensor
    return found


def to_mimo(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename our tensors to those of module 0; `from_mimo` undoes it."""
    back = {ours: theirs for theirs, ours in _RENAMED.items()}
    return {MIMO_PREFIX + back.get(n, n.removeprefix("layer.")): t for n, t in tensors.items()}


def check_fits(found: Mapping[str, Tensor], own: Mapping[str, Tensor], *, source: str) -> None:
    """Check that tensors are exactly those of a module, in shape too.

    Raises:
        ConfigError: what is missing, too much or of another shape.
    """
    problems = [f"it has {name}" for name in sorted(set(found) - set(own))]
    problems += [f"it has no {name}" for name in sorted(set(own) - set(found))]
    for name in sorted(set(own) & set(found)):
        if own[name].shape != found[name].shape:
            theirs, ours = list(found[name].shape), list(own[name].shape)
            problems.append(f"{name} has shape {theirs}, not {ours}")
    if problems:
        raise ConfigError(
            f"{source} cannot start this module: {'; '.join(problems[:4])}; set attention_bias to "
            "what it has, or use start=random"
        )
