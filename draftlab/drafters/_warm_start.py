"""Starting a head's decoder layers as a continuation of the target's own. Read start_layers."""

import torch
from torch import nn

from draftlab.errors import ConfigError
from draftlab.shapes import Float, Tensor
from draftlab.targets.view import TargetView

_JOINED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


@torch.no_grad()
def start_layers(
    layers: nn.ModuleList, target: TargetView, first: int, *, embedding_noise: float
) -> None:
    """Copy target layers into a head whose first layer reads [embedding, hidden] side by side.

    There the hidden half of q, k and v is the target layer's, and so is the norm of the hidden
    state; the embedding half starts as small noise behind a norm of ones.

    Args:
        layers: of the head, with Llama's names inside.
        target: where to copy from.
        first: 0-based target layer for the head's first one, negative from the end; the head's
            further layers start from the target's next ones.
        embedding_noise: half-width of the noise.

    Raises:
        ConfigError: no such layers, or layers of a shape that the head does not have.
    """
    count = target.spec.num_layers
    start = first + count if first < 0 else first
    if not 0 <= start <= start + len(layers) - 1 < count:
        raise ConfigError(
            f"init_from_layer={first} with num_layers={len(layers)}: expected layers within "
            f"0..{count - 1} of target {target.spec.name}"
        )
    for i, layer in enumerate(layers):
        state = dict(target.layer_state(start + i))
        own = dict(layer.named_parameters())
        if i == 0:
            own.pop("input_layernorm.weight").fill_(1.0)
            own["input_layernorm.weight"] = own.pop("hidden_norm.weight")
        joined = _JOINED if i == 0 else ()
        _check_layer(state, own, joined, target, start + i)
        for name, parameter in own.items():
            value = state[name].to(parameter)
            if name in joined:
                width = parameter.shape[1] // 2
                parameter[:, :width].uniform_(-embedding_noise, embedding_noise)
                parameter[:, width:] = value
            else:
                parameter.copy_(value)


@torch.no_grad()
def final_norm_weight(target: TargetView) -> Float[Tensor, " D"]:
    """Read the weight of the target's final norm off its answers to a vector and its negative.

    The vector has mean 0 and is long enough for any eps to vanish, so this holds for RMSNorm and
    LayerNorm, with or without a bias, and whatever offset the weight is stored with.
    """
    signs = torch.ones(target.spec.hidden_size, dtype=target.dtype, device=target.device)
    signs[1::2] = -1
    return (target.final_norm(1e3 * signs) - target.final_norm(-1e3 * signs)) * signs / 2


def _check_layer(
    state: dict[str, Tensor],
    own: dict[str, nn.Parameter],
    joined: tuple[str, ...],
    target: TargetView,
    layer: int,
) -> None:
    problems = [f"it has {name}" for name in sorted(set(state) - set(own))]
    problems += [f"it has no {name}" for name in sorted(set(own) - set(state))]
    for name in sorted(set(own) & set(state)):
        expected = list(own[name].shape)
        if name in joined:
            expected[1] //= 2
        if list(state[name].shape) != expected:
            problems.append(f"{name} has shape {list(state[name].shape)}, not {expected}")
    if target.config["hidden_act"] != "silu":
        problems.append(f"hidden_act is {target.config['hidden_act']}, not silu")
    if problems:
        raise ConfigError(
            f"init_from_layer: layer {layer} of target {target.spec.name} cannot start this head: "
            f"{'; '.join(problems[:4])}; use init_from_layer=null"
        )
