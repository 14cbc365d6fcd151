"""Adapters: a drafter stays as it is, and a low-rank correction of every matrix is trained (LoRA).

In: a drafter. Out: the same one, frozen, with an adapter beside each of its linear layers; merged,
a plain drafter again. Paper: arXiv:2106.09685. Read adapt, then merged.

While training, a layer computes W x + alpha / rank * B A x. What decodes or is served reads weights
directly and would never meet B and A, so an adapted drafter refuses both: `merged` puts layers with
W + alpha / rank * B A in their places for a while. W, A and B are not touched by that, since adding
and subtracting again would not give back the same bits.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import nn

from draftlab.drafters.base import Drafter
from draftlab.errors import CheckpointError, ConfigError
from draftlab.randomness import derive_seed
from draftlab.settings.base import Settings
from draftlab.shapes import Tensor

_NAME = "default"  # what peft calls the only adapter of a layer
_HEADS = frozenset({"lm_head", "lm_heads"})
_REFUSED = ("open", "serving_weights")


class AdapterSettings(Settings):
    """Keys of conf/adapter/*.yaml.

    Attributes:
        kind: none trains the drafter itself; lora freezes it and trains adapters on its layers.
        rank: of a correction; None without adapters.
        alpha: corrections count alpha / rank times; None without adapters.
    """

    kind: Literal["none", "lora"]
    rank: PositiveInt | None
    alpha: PositiveFloat | None

    @model_validator(mode="after")
    def _check(self) -> "AdapterSettings":
        if {self.rank is not None, self.alpha is not None} != {self.kind == "lora"}:
            raise ValueError(
                f"rank={self.rank} and alpha={self.alpha} with kind={self.kind}; expected both "
                "with adapter=lora, and null with adapter=none"
            )
        return self


@dataclass(frozen=True, slots=True)
class BaseDrafter:
    """The frozen drafter that adapters were trained on.

    Attributes:
        folder: where it lies; None when its settings and the target make it again.
        sha256: of its drafter.safetensors; without a folder, a fingerprint of its weights.
    """

    folder: Path | None
    sha256: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """What stands beside a drafter's layers.

    Attributes:
        rank: of a correction.
        alpha: corrections count alpha / rank times.
        base: the drafter below.
        layers: names of the adapted layers.
        trained: names of the parameters that are trained without adapters.
    """

    rank: int
    alpha: float
    base: BaseDrafter
    layers: tuple[str, ...]
    trained: frozenset[str]

    def describe(self) -> str:
        """Say what a resumed training must find again."""
        return f"lora rank {self.rank} alpha {self.alpha:g} on {self.base.sha256}"


def adapt(drafter: Drafter, settings: AdapterSettings, base: BaseDrafter, *, seed: int) -> None:
    """Freeze a drafter and put adapters on the linear layers it trains; they start without a say.

    Embeddings and LM heads are left alone: their rows are no map of hidden states, and heads are
    read as matrices in training too.

    Args:
        drafter: trained already, changed in place; half-precision weights become float32.
        settings: with kind=lora.
        base: what the drafter is.
        seed: of A; the global generator is left as it was.

    Raises:
        ConfigError: the drafter has no such layer, or none so large.
    """
    assert settings.rank is not None, "settings ask for it"
    assert settings.alpha is not None, "settings ask for it"
    check_adapter(drafter, settings.rank)
    names = _layers_to_adapt(drafter)
    _attach(drafter, names, settings.rank, settings.alpha, base)
    for name in names:
        _start(drafter.get_submodule(name), seed, name)


def check_adapter(drafter: Drafter, rank: int) -> None:
    """Refuse adapters that find no layer, or could learn no more than smaller ones.

    A correction B A has no more independent directions than its matrix's smaller side, so a rank
    above that of the largest matrix costs time and memory and changes nothing.

    Args:
        drafter: not adapted yet; reads sizes alone, so the meta device will do.
        rank: of a correction.

    Raises:
        ConfigError: with what to pass.
    """
    layers: list[Any] = [drafter.get_submodule(name) for name in _layers_to_adapt(drafter)]
    if not layers:
        raise ConfigError(
            f"adapter=lora finds nothing to adapt: drafter kind {drafter.kind!r} has no linear "
            "layer that it trains (embeddings and LM heads are left alone); pass adapter=none"
        )
    most = max(min(layer.in_features, layer.out_features) for layer in layers)
    if rank > most:
        raise ConfigError(
            f"adapter.rank={rank} is above the smaller side of every matrix that it would adapt in "
            f"this {drafter.kind} drafter; pass at most adapter.rank={most}, the largest that can "
            "add anything, or far fewer: 8 to 64 are usual"
        )


def adapter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Give all that belongs to the adapter and not to its base: A, B, and the drafter's buffers.

    Buffers are what is counted while training and decoding, such as a Medusa's ranks.
    """
    assert drafter.adapter is not None
    tensors: dict[str, Tensor] = {}
    for name in drafter.adapter.layers:
        layer: Any = drafter.get_submodule(name)
        tensors[f"{name}.lora_A.weight"] = layer.lora_A[_NAME].weight.detach()
        tensors[f"{name}.lora_B.weight"] = layer.lora_B[_NAME].weight.detach()
    kept = drafter.state_dict().keys()
    return tensors | {name: x for name, x in drafter.named_buffers() if name in kept}


def restore_adapter(
    drafter: Drafter,
    tensors: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    base: BaseDrafter,
    source: Path,
) -> None:
    """Put saved adapters on their base, bit for bit.

    Args:
        drafter: the base, changed in place.
        tensors: what `adapter_tensors` gave.
        rank: of a correction.
        alpha: corrections count alpha / rank times.
        base: what the drafter is.
        source: where the tensors come from, for the message.

    Raises:
        CheckpointError: they are of another drafter.
    """
    ending = ".lora_A.weight"
    names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    layers = dict(drafter.named_modules())
    problems = [f"it has {name}" for name in names if not isinstance(layers.get(name), nn.Linear)]
    if not problems and names:
        _attach(drafter, names, rank, alpha, base)
        places = adapter_tensors(drafter)
        problems += [f"it has no {name}" for name in sorted(places.keys() - tensors.keys())]
        problems += [f"it has {name}" for name in sorted(tensors.keys() - places.keys())]
        for name in sorted(places.keys() & tensors.keys()):
            if places[name].shape == tensors[name].shape:
                places[name].copy_(tensors[name])
            else:
                found, wanted = list(tensors[name].shape), list(places[name].shape)
                problems.append(f"{name} has shape {found}, not {wanted}")
    if problems or not names:
        raise CheckpointError(
            f"{source} does not fit its base drafter: {'; '.join(problems[:4]) or 'it is empty'}; "
            "use another checkpoint"
        )


@contextmanager
def merged(drafter: Drafter) -> Iterator[None]:
    """Let a drafter be a plain one for a while, its adapters in its weights; others stay as is."""
    adapter = drafter.adapter
    if adapter is None:
        yield
        return
    layers = {name: drafter.get_submodule(name) for name in adapter.layers}
    try:
        _merge_layers(drafter, adapter)
        yield
    finally:
        for name, layer in layers.items():
            drafter.set_submodule(name, layer)
        _guard(drafter, adapter)


def merge(drafter: Drafter) -> None:
    """Put adapters into a drafter's weights for good; it can be trained like any other after it."""
    adapter = drafter.adapter
    assert adapter is not None
    _merge_layers(drafter, adapter)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name in adapter.trained)


def _layers_to_adapt(drafter: Drafter) -> list[str]:
    heads_of = [getattr(module, "get_output_embeddings", None) for module in drafter.modules()]
    heads = {id(head()) for head in heads_of if callable(head)}
    return [
        name
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and id(module) not in heads
        and _HEADS.isdisjoint(name.split("."))
    ]


def _attach(
    drafter: Drafter, names: Collection[str], rank: int, alpha: float, base: BaseDrafter
) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    layers = tuple(name for name, _ in drafter.named_modules() if name in names)
    trained = frozenset(name for name, p in drafter.named_parameters() if p.requires_grad)
    for parameter in drafter.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()  # small corrections vanish in bfloat16
    # a pattern, since peft takes names in a list for endings too
    pattern = "|".join(map(re.escape, layers))
    options: dict[str, Any] = {"r": rank, "lora_alpha": alpha, "target_modules": pattern}
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten
        inject_adapter_in_model(LoraConfig(**options), drafter)
    _guard(drafter, Adapter(rank, alpha, base, layers, trained))


@torch.no_grad()
def _start(layer: Any, seed: int, name: str) -> None:
    """Start A as a linear layer starts, from (seed, name), and B at zero."""
    first, second = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    generator = torch.Generator().manual_seed(derive_seed("adapter", seed, name))
    drawn = torch.rand(first.shape, generator=generator)
    first.copy_((2 * drawn - 1) * first.shape[1] ** -0.5)
    second.zero_()


def _merge_layers(drafter: Drafter, adapter: Adapter) -> None:
    for name in adapter.layers:
        drafter.set_submodule(name, _merged_layer(drafter.get_submodule(name)))
    drafter.adapter = None
    for method in _REFUSED:
        vars(drafter).pop(method)


@torch.no_grad()
def _merged_layer(layer: Any) -> nn.Linear:
    base: nn.Linear = layer.get_base_layer()
    # on no device: both of its tensors are given
    plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    weight = base.weight + layer.get_delta_weight(_NAME)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = base.bias
    return plain.train(layer.training)


def _guard(drafter: Drafter, adapter: Adapter) -> None:
    """Say what stands beside the layers, and let nobody read weights that know nothing of it."""
    drafter.adapter = adapter
    for method in _REFUSED:
        vars(drafter)[method] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        "this drafter has adapters beside its weights, and decoding and serving read weights "
        "alone; do it inside `with merged(drafter)`, or load the saved adapter as any drafter"
    )
