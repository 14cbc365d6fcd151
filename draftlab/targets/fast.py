"""The fast door: a forward pass of our own for Llama-type models, fused and packed.

Same inputs and outputs as the transformers path (adapter.py), which stays the reference: at load
the two are compared on taps and logits. Query, key and value projections are one product, gate and
up are one product, residual additions ride on the product before them, and weights are packed for
oneDNN on CPU. At one token a pass a quarter of the time goes to small operations between products:
what counts there is how few they are. Where an installed flash-attention kernel was found to agree
(flash_chain.py, load.py), steps without a tree attend through it and need no mask; packed rows
attend in pieces (packed_attention.py). Serves Llama, Mistral, Qwen2 and Qwen3 dense models; other
families keep the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from draftlab.shapes import Float, Tensor
from draftlab.targets.attention import tile_mask
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.flash_chain import ChainPass, FlashChain
from draftlab.targets.packed_attention import PackedAttention
from draftlab.targets.packing import PackedLinear
from draftlab.targets.step import Step, StepOutput

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_KNOWN_LAYER_PARAMETERS = {
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    *(f"self_attn.{n}_proj.{p}" for n in "qkvo" for p in ("weight", "bias")),
    *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
}


def refuse_fast_door(model: nn.Module, config: dict[str, Any]) -> str | None:
    """Say why the fast door does not serve a model, or None when it does."""
    if config["model_type"] not in FAMILIES:
        return f"model type {config['model_type']} (served: {', '.join(FAMILIES)})"
    if config.get("hidden_act") != "silu":
        return f"activation {config.get('hidden_act')}"
    layers = model.get_submodule("model.layers")
    for layer in layers.children():
        names = {name for name, _ in layer.named_parameters()}
        if not names <= _KNOWN_LAYER_PARAMETERS:
            return f"unknown layer weights {sorted(names - _KNOWN_LAYER_PARAMETERS)[:3]}"
    head = model.get_submodule("lm_head")
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return "an LM head that is not a plain matrix"
    return None


def layer_windows(config: dict[str, Any]) -> list[int | None]:
    """Give the sliding window of each layer as the config tells it, tokens, or None."""
    count, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    types = config.get("layer_types")
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types[:count]]
    return [window if config["model_type"] == "mistral" else None] * count


@dataclass(slots=True)
class _Layer:
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norm_in: Tensor
    norm_post: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    window: int | None


class FastDoor:
    """One forward pass over a `Step`, writing into `KVBuffers`. See the module's docstring.

    Attributes:
        chain: attends in steps of chains; None leaves all to torch's fused attention.
    """

    name = "fast"

    def __init__(self, model: nn.Module, config: dict[str, Any], windows: list[int | None]) -> None:
        """Fuse and pack a model's weights.

        Args:
            model: a causal LM that `refuse_fast_door` has let through, frozen, in eval mode.
            config: its decoder config as plain data.
            windows: sliding window of each layer in tokens, or None.
        """
        self.chain: FlashChain | None = None
        layers = list(model.get_submodule("model.layers").children())
        self._embedding = model.get_submodule("model.embed_tokens").get_parameter("weight")
        self._norm = _double(model.get_submodule("model.norm").get_parameter("weight"))
        self._head = PackedLinear(model.get_submodule("lm_head").get_parameter("weight"), None)
        self._rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model.get_submodule(
            "model.rotary_emb"
        )
        self._eps = float(config["rms_norm_eps"])
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config["num_key_value_heads"])
        self._head_dim = int(config["head_dim"])
        self._scale = self._head_dim**-0.5
        self._groups = self._heads // self._kv_heads
        self._layers = [
            _fuse(layer, window, self._kv_heads, self._head_dim)
            for layer, window in zip(layers, windows, strict=True)
        ]

    def forward(
        self, kv: KVBuffers, step: Step, request: FeatureRequest, wants_logits: bool
    ) -> StepOutput:
        """Run new tokens through the model; see `Target.run`."""
        taps: list[Tensor] = []
        wanted = set(request.tap_layers)
        hidden, where = self._begin(kv, step)
        for number in range(len(self._layers)):
            hidden = self._run_layer(number, hidden, where)
            if number + 1 in wanted:
                taps.append(hidden)
        final = None
        if wants_logits or request.wants_final:
            final = self._rms(hidden, self._norm)
        logits = self._head(final) if wants_logits and final is not None else None
        stacked = torch.stack(taps, dim=2) if taps else None
        features = TargetFeatures(stacked, final if request.wants_final else None)
        return StepOutput(logits, features)

    def run_layers(
        self, kv: KVBuffers, step: Step, layers: tuple[int, ...]
    ) -> Float[Tensor, "R T D"]:
        """Run new tokens through some decoder layers only; see `TargetView.run_layers`."""
        hidden, where = self._begin(kv, step)
        for number in layers:
            hidden = self._run_layer(number, hidden, where)
        return hidden

    def _begin(self, kv: KVBuffers, step: Step) -> "tuple[Tensor, _Where]":
        """Embed a step's tokens, and compute what all layers share."""
        hidden = F.embedding(step.ids, self._embedding)
        cos, sin = self._rope_tables(hidden, step.positions)
        memory = _Memory(kv, step)
        if step.segments is not None:
            packed = _PackedPass(PackedAttention(step.segments), memory)
            return hidden, _Where(cos, sin, {}, memory, packed)
        if self.chain is not None and step.ancestors is None:
            # depths of such a step part from the chain's only past the table of positions. Those
            # columns never count, and none that counts sees one: windows may go by columns
            return hidden, _Where(
                cos, sin, {}, memory, self.chain.over(kv, step, is_prefix=memory.is_prefix)
            )
        return hidden, _Where(cos, sin, self._masks(step), memory, None)

    def _run_layer(
        self, number: int, hidden: Float[Tensor, "R T D"], where: "_Where"
    ) -> Float[Tensor, "R T D"]:
        layer = self._layers[number]
        hidden = layer.out.add_to(hidden, self._attend(layer, number, hidden, where))
        normed = self._rms(hidden, layer.norm_post)
        gate, up = layer.gate_up(normed).chunk(2, dim=-1)
        return layer.down.add_to(hidden, F.silu(gate).mul_(up))

    def _attend(
        self,
        layer: _Layer,
        number: int,
        hidden: Float[Tensor, "R T D"],
        where: "_Where",
    ) -> Float[Tensor, "R T Da"]:
        r, t, _ = hidden.shape
        groups, kv_heads, width = self._groups, self._kv_heads, self._head_dim
        x = layer.qkv(self._rms(hidden, layer.norm_in)).view(r, t, -1, width)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, keys, values = x.split((self._heads, kv_heads, kv_heads), dim=2)
            query, keys = self._rms(query, layer.q_norm), self._rms(keys, layer.k_norm)
            x = torch.cat((query, keys, values), dim=2)
        # rotate_half(x) * sin == roll(x, Dh / 2) * (sin with its first half negated); values are
        # turned by no angle, so that one copy stores them with the keys
        x = torch.addcmul(x * where.cos, x.roll(width // 2, -1), where.sin)
        where.memory.write(number, x.narrow(2, self._heads, 2 * kv_heads))
        query = x.narrow(2, 0, self._heads)
        if where.maskless is not None:
            out = where.maskless(number, query, scale=self._scale, window=layer.window)
            return out.unflatten(2, (kv_heads, groups)).transpose(2, 3).reshape(r, t, -1)
        keys, values = where.memory.read(number)
        if t == 1:
            query = query.view(r, kv_heads, groups, width)
        else:
            query = query.transpose(1, 2).reshape(r, kv_heads, groups * t, width)
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=where.masks[layer.window], scale=self._scale
        ).transpose(1, 2)
        if t > 1:
            out = out.unflatten(1, (groups, t)).transpose(1, 2)
        return out.reshape(r, t, -1)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise; the weight of a norm over the hidden width comes doubled on CPU."""
        width = x.shape[-1]
        if weight.shape[0] == width:
            return F.rms_norm(x, (width,), weight, self._eps)
        # [x, -x] has mean 0 and the mean square of x: the layer norm of it, one kernel where
        # rms_norm is ten on CPU
        both = torch.cat((x, -x), dim=-1)
        return torch.layer_norm(both, (2 * width,), weight, None, self._eps).narrow(-1, 0, width)

    def _rope_tables(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(hidden, positions)
        half = self._head_dim // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        turned = (-1, -1, self._heads + self._kv_heads, -1)
        still = (-1, -1, self._kv_heads, -1)
        cos, signed = cos.unsqueeze(2), signed.unsqueeze(2)
        return (
            torch.cat((cos.expand(turned), torch.ones_like(cos).expand(still)), dim=2),
            torch.cat((signed.expand(turned), torch.zeros_like(cos).expand(still)), dim=2),
        )

    def _masks(self, step: Step) -> dict[int | None, Tensor | None]:
        # a single token of a single row that sees every slot up to its own needs no mask; reading
        # its base from a device would cost more than the mask does
        lone = (
            step.ids.numel() == 1
            and step.depths is None
            and step.is_prefix is None
            and step.base.device.type == "cpu"
            and int(step.base[0]) + 1 == step.live
        )
        masks: dict[int | None, Tensor | None] = {}
        for window in {layer.window for layer in self._layers}:
            if lone and window is None:
                masks[window] = None
            else:
                masks[window] = tile_mask(step.visible(window), self._groups)
        return masks


class _Memory:
    """Writes a layer's new keys and values and reads back all the step may look at."""

    def __init__(self, kv: KVBuffers, step: Step) -> None:
        self._kv = kv
        self._rows = step.rows
        self._live = step.live
        self._flat = kv.pair_slots(step.rows, step.slots)
        is_prefix = step.is_prefix
        if is_prefix is None:
            in_order = torch.arange(step.rows.shape[0], device=step.rows.device)
            is_prefix = bool((step.rows == in_order).all())
        self.is_prefix = is_prefix

    def write(self, layer: int, pairs: Float[Tensor, "R T P Dh"]) -> None:
        self._kv.write_pairs(layer, self._flat, pairs)

    def read(self, layer: int) -> tuple[Float[Tensor, "R H S Dh"], Float[Tensor, "R H S Dh"]]:
        return self._kv.read(layer, self._rows, self._live, is_prefix=self.is_prefix)


@dataclass(slots=True)
class _PackedPass:
    """Packed rows over memory, called as a kernel for chains is."""

    packed: PackedAttention
    memory: _Memory

    def __call__(
        self, layer: int, query: Float[Tensor, "R T Hq Dh"], *, scale: float, window: int | None
    ) -> Float[Tensor, "R T Hq Dh"]:
        keys, values = self.memory.read(layer)
        return self.packed.attend(query.transpose(1, 2), keys, values, window=window, scale=scale)


@dataclass(slots=True)
class _Where:
    """What the layers of one pass share: angles, memory, and masks by window or a way without."""

    cos: Tensor
    sin: Tensor
    masks: dict[int | None, Tensor | None]
    memory: _Memory
    maskless: ChainPass | _PackedPass | None


def _fuse(layer: nn.Module, window: int | None, kv_heads: int, head_dim: int) -> _Layer:
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    parts = [attention.get_submodule(f"{name}_proj") for name in "qkv"]
    biases = [part.bias for part in parts if isinstance(part.bias, Tensor)]
    out = attention.get_submodule("o_proj")
    out_bias = out.bias if isinstance(out.bias, Tensor) else None
    gate, up = (
        mlp.get_submodule(f"{name}_proj").get_parameter("weight") for name in ("gate", "up")
    )
    # attention gives its heads in the order (group, key head): so do the columns that read them
    columns = out.get_parameter("weight").unflatten(1, (kv_heads, -1, head_dim))
    norms = dict(attention.named_parameters())
    return _Layer(
        qkv=PackedLinear(
            torch.cat([part.get_parameter("weight") for part in parts]),
            torch.cat(biases) if biases else None,
        ),
        out=PackedLinear(columns.transpose(1, 2).flatten(1), out_bias),
        gate_up=PackedLinear(torch.cat((gate, up)), None),
        down=PackedLinear(mlp.get_submodule("down_proj").get_parameter("weight"), None),
        norm_in=_double(layer.get_submodule("input_layernorm").get_parameter("weight")),
        norm_post=_double(layer.get_submodule("post_attention_layernorm").get_parameter("weight")),
        q_norm=norms.get("q_norm.weight"),
        k_norm=norms.get("k_norm.weight"),
        window=window,
    )


def _double(weight: Float[Tensor, " D"]) -> Float[Tensor, " D2"]:
    """Lay out a norm's weight for `FastDoor._rms`."""
    return torch.cat((weight, weight)).detach() if weight.device.type == "cpu" else weight.detach()
