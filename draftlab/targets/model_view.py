"""The window drafters have on a transformers target.

Read head and rope. Everything is read through the adapter's `Anatomy`, so no family is named here.
"""

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from draftlab.errors import ConfigError, UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import HFDoor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.fast import FastDoor
from draftlab.targets.raw_tensors import read_raw_tensors
from draftlab.targets.sharding import whole_tensor
from draftlab.targets.spec import TargetSpec
from draftlab.targets.step import Step
from draftlab.targets.view import TargetView


class ModelView(TargetView):
    """A view on the modules of a loaded model.

    Attributes:
        spec: identity and sizes.
        tokenizer: the target's own.
        config: the decoder's sizes and switches, with the usual names filled in.
        device: where the weights are, or the copies of those that drafters read.
        dtype: of the weights.
    """

    def __init__(self, spec: TargetSpec, tokenizer: Any, reference: HFDoor) -> None:
        """Look at a model through its reference door."""
        self.spec = spec
        self.tokenizer = tokenizer
        self._anatomy = reference.anatomy
        self._whole_config = reference.model.config
        self._layer_runner: HFDoor | FastDoor = reference
        self.config = plain_config(reference)
        weight = self._anatomy.head_weight
        self.device = weight.device
        self.dtype = weight.dtype

    def on(self, device: torch.device) -> "ModelView":
        """Give a view for drafters on another device, with copies there of what they compute with.

        Copied are embedding, LM head, final norm and rotary table. The layers stay where they are:
        their weights are copied when they are read, and no drafter runs them from there.
        """
        if device == self.device:
            return self
        old = self._anatomy
        near = (old.embedding, old.head, old.norm, old.rotary)
        together = nn.ModuleList(module for module in near if module is not None)
        known: dict[int, Any] = {  # by which the copies hold moved tensors, tied ones once
            id(weight): nn.Parameter(weight.detach().to(device), requires_grad=False)
            for weight in together.parameters()
        } | {id(buffer): buffer.to(device) for buffer in together.buffers()}
        embedding, head, norm, rotary = copy.deepcopy(near, known)
        far = copy.copy(self)
        far.device = device
        far._anatomy = replace(
            old,
            embedding=embedding,
            head=head,
            norm=norm,
            rotary=rotary,
            embedding_weight=embedding.get_parameter("weight"),
            head_weight=head.get_parameter("weight"),
        )
        return far

    def embed(self, ids: Int[Tensor, "*N"]) -> Float[Tensor, "*N D"]:
        """Embed token ids exactly as the target does (its scale included)."""
        return self._anatomy.embedding(ids)

    def head(self, final: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """Compute the target's logits from final hidden states.

        Scale and cap are those that transformers keeps in the config; the gate compares the result
        with the model's own logits at load.
        """
        logits = self._anatomy.head(final)
        if (scale := self.config.get("logit_scale")) is not None:  # Cohere
            logits = logits * scale
        if (divisor := self.config.get("logits_scaling")) is not None:  # Granite
            logits = logits / divisor
        if (cap := self.config.get("final_logit_softcapping")) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def head_rows(self, ids: Int[Tensor, " C"] | None) -> Float[Tensor, "C D"]:
        """Give rows of the LM-head matrix: a copy of those named, or the whole matrix itself."""
        weight = self._anatomy.head_weight.detach()
        return weight if ids is None else weight[ids.to(self.device)]

    def final_norm(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """Apply the target's final norm.

        Raises:
            UnsupportedTarget: the model has no norm that draftlab knows to be the final one.
        """
        if self._anatomy.norm is None:
            raise UnsupportedTarget(
                f"target {self.spec.name} ({self.config['model_type']}) has no final norm that "
                "draftlab could find; use a drafter that reads the final hidden state instead"
            )
        return self._anatomy.norm(hidden)

    def rope(
        self, positions: Int[Tensor, "*N"]
    ) -> tuple[Float[Tensor, "*N Dr"], Float[Tensor, "*N Dr"]]:
        """Compute cos and sin with the target's own rotary module, scaling included, in float32.

        Where layers differ (Gemma-3), these are the tables of the full-attention layers.

        Raises:
            UnsupportedTarget: the target has no rotary positions.
        """
        rotary: Any = self._anatomy.rotary
        if rotary is None:
            raise UnsupportedTarget(
                f"target {self.spec.name} ({self.config['model_type']}) has no rotary positions; "
                "choose a drafter that brings positions of its own, such as ngram or medusa"
            )
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        flat = positions.reshape(1, -1)
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            cos, sin = rotary(like, flat, "full_attention")
        else:
            cos, sin = rotary(like, flat)
        if cos.shape[-1] == getattr(rotary, "inv_freq", cos[..., :0]).numel():  # gpt-oss: one half
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        shape = (*positions.shape, cos.shape[-1])
        return cos.float().reshape(shape), sin.float().reshape(shape)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Give one decoder layer's weights by their names inside the layer, 0-based."""
        self._check_layers((layer,))
        module = self._anatomy.layers[layer]
        return {
            name: whole_tensor(weight.detach()).to(self.device)
            for name, weight in module.named_parameters()
        }

    def raw_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Read tensors of the checkpoint by the beginning of their names, as they are stored."""
        place = getattr(self._whole_config, "_name_or_path", "")
        commit = getattr(self._whole_config, "_commit_hash", None)
        return read_raw_tensors(place, commit, prefix) if place else {}

    def run_layers(
        self, kv: KVBuffers, step: Step, layers: tuple[int, ...]
    ) -> Float[Tensor, "R T D"]:
        """Run new tokens through some decoder layers only, for self-speculation.

        Raises:
            ConfigError: layers out of range or out of order, or on another device.
        """
        self._check_layers(layers)
        if kv.data.device != self.device:
            raise ConfigError(
                f"this drafter is on {self.device} and runs layers of a target on "
                f"{kv.data.device}; pass hardware.drafter_device=null"
            )
        with torch.inference_mode():
            return self._layer_runner.run_layers(kv, step, layers)

    def run_layers_through(self, door: HFDoor | FastDoor) -> None:
        """Choose the way `run_layers` takes; the target's owner does, never a drafter."""
        self._layer_runner = door

    def _check_layers(self, layers: tuple[int, ...]) -> None:
        count = self.spec.num_layers
        if (
            not layers
            or list(layers) != sorted(set(layers))
            or not 0 <= layers[0] <= layers[-1] < count
        ):
            raise ConfigError(
                f"layers={list(layers)}: expected ascending, distinct numbers in 0..{count - 1}"
            )


def plain_config(reference: HFDoor) -> dict[str, Any]:
    """Give a model's text config as plain data under the names most families share.

    Families with names of their own (GPT-2, Gemma) get the shared names beside them; where layers
    have rope tables of their own, `rope_parameters` is that of the full-attention layers.
    """
    config = reference.model.config.get_text_config()
    data = config.to_dict()
    data["model_type"] = config.model_type

    def fill(name: str, *others: str, default: Any = None) -> None:
        names = (name, config.attribute_map.get(name, name), *others)
        data[name] = next((data[n] for n in names if data.get(n) is not None), default)

    fill("hidden_size", "d_model")
    fill("num_attention_heads")
    fill("max_position_embeddings")
    fill("intermediate_size", "n_inner", default=4 * data["hidden_size"])
    fill("hidden_act", "hidden_activation", "activation_function")
    fill("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
    if heads := data["num_attention_heads"]:
        fill("num_key_value_heads", default=heads)
        fill("head_dim", default=data["hidden_size"] // heads)
    rope = data.get("rope_parameters")
    if isinstance(rope, dict) and "full_attention" in rope:
        data["rope_parameters"] = rope["full_attention"]
    return data
