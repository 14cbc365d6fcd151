"""Encoder-decoder targets of the T5 family: a prompt is encoded once, the answer is decoded.

In: a transformers model. Out: a `Target` whose memory also holds, for every slot, the prompt's
cross-attention keys and values. Decoding only: nothing is trained on such a target. Self-attention
has a bias by distance instead of positions in the keys; it is computed from each column's own
position, so chains, trees and ragged rows are exact. Read `EncoderDecoderTarget.encode`, then
`EncoderDecoderDoor.forward`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from draftlab.data.batch import TokenBatch
from draftlab.errors import ConfigError, ShapeMismatch, UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import HFDoor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.gate import Admission
from draftlab.targets.model_view import ModelView
from draftlab.targets.self_check import TOLERANCE
from draftlab.targets.spec import TargetSpec
from draftlab.targets.step import Step, StepOutput
from draftlab.targets.target import Target, describe

FAMILIES = ("t5", "mt5", "umt5")
_NO_FEATURES = FeatureRequest()
# prompts that are encoded together, padding included, tokens
_ENCODED_TOGETHER = 4096


class EncoderDecoderKV(KVBuffers):
    """The decoder's own keys and values, and those of each slot's encoded prompt.

    Attributes:
        prompts: ids of each slot's prompt; empty where none was encoded. A draft model of the same
            family reads them, for it encodes the prompt as well.
        prompt_lengths: their lengths, on the device.
        cross: keys and values of the prompts, all decoder layers; grows with the longest prompt.
    """

    def __init__(self, **sizes: Any) -> None:
        """Allocate the decoder's memory; that of the prompts comes with the prompts."""
        super().__init__(**sizes)
        layers, _, slots, _, heads, width = self.data.shape
        self.prompts: list[list[int]] = [[] for _ in range(slots)]
        self.prompt_lengths = torch.ones(slots, dtype=torch.int64, device=self.data.device)
        self.cross = self.data.new_zeros(layers, 2, slots, heads, 1, width)

    def put_prompts(
        self,
        slots: list[int],
        prompts: list[list[int]],
        keys_values: Float[Tensor, "L 2 R H P Dh"],
    ) -> None:
        """Store encoded prompts; each slot has one until the next takes its place."""
        width = keys_values.shape[4]
        if width > self.cross.shape[4]:
            self.cross = F.pad(self.cross, (0, 0, 0, width - self.cross.shape[4]))
        index = torch.tensor(slots, device=self.cross.device)
        self.cross[:, :, index, :, :width] = keys_values
        lengths = [len(prompt) for prompt in prompts]
        self.prompt_lengths[index] = torch.tensor(lengths, device=self.cross.device)
        for slot, prompt in zip(slots, prompts, strict=True):
            self.prompts[slot] = list(prompt)


class EncoderDecoderView(ModelView):
    """A view on the decoder's side of the model."""

    def head(self, final: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """Compute logits from final hidden states; the first T5 models scale them down before."""
        if _scales_output(self.config):
            final = final * self.spec.hidden_size**-0.5
        return self._anatomy.head(final)

    def run_layers(
        self, kv: KVBuffers, step: Step, layers: tuple[int, ...]
    ) -> Float[Tensor, "R T D"]:
        """Refuse: no drafter runs part of an encoder-decoder model.

        Raises:
            UnsupportedTarget: always.
        """
        raise UnsupportedTarget(
            f"target {self.spec.name} is an encoder-decoder model, and its layers do not run one "
            "by one; pass drafter=draft_model with a smaller model of its family"
        )


class EncoderDecoderDoor:
    """One pass of the decoder over a `Step`, through the modules' own projections.

    Attributes:
        name: what reports call this path.
    """

    name = "encoder_decoder"

    def __init__(self, model: PreTrainedModel, view: EncoderDecoderView) -> None:
        """Find the decoder's blocks."""
        self._decoder: Any = model.get_decoder()
        self._encoder: Any = model.get_encoder()
        self._view = view
        self._blocks: list[Any] = list(self._decoder.block)
        config = view.config
        self._num_buckets = int(config["relative_attention_num_buckets"])
        self._max_distance = int(config["relative_attention_max_distance"])

    @property
    def weight(self) -> Float[Tensor, "Out In"]:
        """A weight whose dtype and device are the model's."""
        return self._blocks[0].layer[0].SelfAttention.k.weight

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Heads and head width of the memory."""
        attention = self._blocks[0].layer[0].SelfAttention
        return attention.n_heads, attention.key_value_proj_dim

    def forward(
        self, kv: KVBuffers, step: Step, request: FeatureRequest, wants_logits: bool
    ) -> StepOutput:
        """Run new tokens of some rows; see `Target.run`."""
        if not isinstance(kv, EncoderDecoderKV) or step.live > kv.capacity:
            raise ShapeMismatch(
                f"a step reaches slot {step.live - 1} of {type(kv).__name__} with capacity "
                f"{kv.capacity}; expected enough memory from this target's open_kv"
            )
        hidden = self._decoder.embed_tokens(step.ids)
        flat = kv.flat_slots(step.rows, step.slots)
        in_order = torch.arange(step.rows.shape[0], device=step.rows.device)
        is_prefix = bool(torch.equal(step.rows, in_order))
        hides = ~step.visible(None).unsqueeze(1)
        buckets = self._buckets(step)
        place = torch.arange(kv.cross.shape[4], device=hidden.device)
        sees_prompt = (place < kv.prompt_lengths[step.rows].unsqueeze(1))[:, None, None]
        taps: list[Tensor] = []
        bias = hidden
        for number, block in enumerate(self._blocks):
            attention, norm = block.layer[0].SelfAttention, block.layer[0].layer_norm
            if attention.has_relative_attention_bias:
                bias = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
                bias = bias.masked_fill(hides, torch.finfo(bias.dtype).min)
            normed = norm(hidden)
            kv.write(number, flat, _heads(attention, "k", normed), _heads(attention, "v", normed))
            keys, values = kv.read(number, step.rows, step.live, is_prefix=is_prefix)
            hidden = hidden + _attend(attention, normed, keys, values, bias)
            attention, norm = block.layer[1].EncDecAttention, block.layer[1].layer_norm
            cross = kv.cross[number][:, step.rows]
            hidden = hidden + _attend(attention, norm(hidden), cross[0], cross[1], sees_prompt)
            hidden = block.layer[2](hidden)
            if number + 1 in request.tap_layers:
                taps.append(hidden)
        final = self._decoder.final_layer_norm(hidden)
        return StepOutput(
            logits=self._view.head(final) if wants_logits else None,
            features=TargetFeatures(
                taps=torch.stack(taps, dim=2) if taps else None,
                final=final if request.wants_final else None,
            ),
        )

    def encode(self, prompts: list[list[int]]) -> Float[Tensor, "L 2 R H P Dh"]:
        """Encode prompts, padded on the right, down to the cross-attention keys and values."""
        longest = max(len(prompt) for prompt in prompts)
        device = self.weight.device
        ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = torch.arange(longest, device=device) < lengths.unsqueeze(1)
        hidden = self._encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        layers = [block.layer[1].EncDecAttention for block in self._blocks]
        pairs = [torch.stack([_heads(a, n, hidden) for n in ("k", "v")]) for a in layers]
        return torch.stack(pairs)

    def _buckets(self, step: Step) -> Int[Tensor, "R T S"]:
        """Sort the distance from each column back to each slot into the bias table's rows.

        Distances come from positions: in a tree a column's slot is not its depth.
        """
        count = step.ids.shape[1]
        slot = torch.arange(step.live, device=step.ids.device)
        column = slot - step.base.unsqueeze(1)
        inside = (column >= 0) & (column < count)
        own = step.positions.gather(1, column.clamp(0, count - 1))
        distance = step.positions.unsqueeze(2) - torch.where(inside, own, slot).unsqueeze(1)
        distance = distance.clamp_min(0)
        exact = self._num_buckets // 2
        growth = torch.log(distance.float() / exact) / math.log(self._max_distance / exact)
        # half of the rows are for one distance each, the others for ever longer stretches
        far = exact + (growth.clamp_min(0) * (self._num_buckets - exact)).long()
        return torch.where(distance < exact, distance, far.clamp_max(self._num_buckets - 1))


class EncoderDecoderTarget(Target):
    """A target that reads the prompt with an encoder and answers with a decoder.

    Its rows are decoder tokens: `encode` takes a prompt in and gives the token the answer starts
    from.
    """

    door: EncoderDecoderDoor

    def open_kv(self, slots: int, capacity: int) -> EncoderDecoderKV:
        """Allocate memory for `slots` answers of at most `capacity` tokens, start included."""
        heads, width = self._require_memory()
        weight = self.door.weight
        with torch.inference_mode():
            return EncoderDecoderKV(
                num_layers=self.spec.num_layers,
                num_kv_heads=heads,
                head_dim=width,
                slots=slots,
                capacity=capacity,
                dtype=weight.dtype,
                device=weight.device,
            )

    def encode(self, kv: KVBuffers, slots: list[int], prompts: list[list[int]]) -> list[list[int]]:
        """Encode prompts into their slots, once; give the token each answer starts from."""
        assert isinstance(kv, EncoderDecoderKV), "made by open_kv"
        with torch.inference_mode():
            for group in _groups(prompts):
                mine = [prompts[i] for i in group]
                kv.put_prompts([slots[i] for i in group], mine, self.door.encode(mine))
        start: int = self.model.config.decoder_start_token_id
        return [[start] for _ in prompts]

    def read_features(self, batch: TokenBatch, request: FeatureRequest) -> TargetFeatures:
        """Refuse to train.

        Raises:
            UnsupportedTarget: always.
        """
        raise UnsupportedTarget(
            f"target {self.spec.name} is an encoder-decoder model: draftlab decodes with it and "
            "trains nothing on it; pass drafter=draft_model drafter.start=pretrained with a "
            "smaller model of its family"
        )

    def forward_plainly(
        self,
        ids: Int[Tensor, "R T"],
        request: FeatureRequest = _NO_FEATURES,
        *,
        wants_logits: bool = True,
    ) -> StepOutput:
        """Refuse: a sequence without its prompt means nothing here.

        Raises:
            UnsupportedTarget: always.
        """
        raise UnsupportedTarget(
            f"target {self.spec.name} is an encoder-decoder model and runs no bare sequences; use "
            "encode and run"
        )


def build_encoder_decoder(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    source: str,
    quantisation: str = "none",
) -> EncoderDecoderTarget:
    """Freeze a model of the T5 family and compare our passes with its own.

    Args:
        model: one of `FAMILIES`.
        tokenizer: its tokenizer.
        name: what a person calls the target.
        source: where it came from: hub, local, gguf, demo, tiny or draft.
        quantisation: "none", or in words.

    Raises:
        TargetMismatch: the tokenizer knows ids beyond the model's rows.
        UnsupportedTarget: another family, or other numbers than transformers gives.
    """
    if model.config.model_type not in FAMILIES:
        raise UnsupportedTarget(
            f"target {name} is an encoder-decoder model of type {model.config.model_type}; "
            f"expected one of {', '.join(FAMILIES)}"
        )
    if model.config.decoder_start_token_id is None:
        raise ConfigError(
            f"the config of target {name} has no decoder_start_token_id; expected the id answers "
            "start from, for T5 that of the padding token"
        )
    model.eval().requires_grad_(False)
    reference = HFDoor(model)
    spec: TargetSpec = describe(model, tokenizer, reference, name, source, quantisation)
    view = EncoderDecoderView(spec, tokenizer, reference)
    door = EncoderDecoderDoor(model, view)
    report = {
        "model_type": model.config.model_type,
        "windows": [None] * spec.num_layers,
        "compared_with": reference.plain_attention,
    }
    target = EncoderDecoderTarget(
        model,
        tokenizer,
        spec,
        reference=reference,
        view=view,
        admission=Admission(None, door.kv_shape, report),
        door=door,
    )
    _check_numbers(target)
    return target


@torch.inference_mode()
def _check_numbers(target: EncoderDecoderTarget) -> None:
    """Compare ragged passes and a tree with transformers' own whole forward.

    Raises:
        UnsupportedTarget: they differ by more than rounding.
    """
    count, device = target.spec.num_token_ids, target.device
    some = [(7919 * i + 104729) % count for i in range(40)]
    prompts, answers = [some[:9], some[9:13]], [some[13:23], some[23:30]]
    kv = target.open_kv(2, 16)
    starts = target.encode(kv, [0, 1], prompts)
    texts = [start + answer for start, answer in zip(starts, answers, strict=True)]
    rows, base = torch.arange(2, device=device), torch.tensor([7, 4], device=device)
    first = torch.tensor([text[:7] for text in texts], device=device)
    target.run(kv, Step(rows, first, torch.zeros_like(rows), 7), wants_logits=False)
    # the anchor, a wrong child, the right one and its child
    ids = torch.tensor(
        [[t[b], t[b], t[b + 1], t[b + 2]] for t, b in zip(texts, (7, 4), strict=True)]
    )
    depths = torch.tensor([0, 1, 1, 2], device=device).expand(2, -1)
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], device=device) > 0
    step = Step(rows, ids.to(device), base, 11, depths, sees.expand(2, -1, -1))
    found = target.run(kv, step).logits
    assert found is not None, "asked for, so given"
    gap = size = 0.0
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        whole = target.model(
            input_ids=torch.tensor([prompt], device=device),
            decoder_input_ids=torch.tensor([text], device=device),
            use_cache=False,
        ).logits[0]
        at = int(base[row])
        gap = max(gap, float((found[row, [0, 2, 3]] - whole[at : at + 3]).abs().max()))
        size = max(size, float(whole.abs().max()))
    target.report["stepwise_difference"] = gap / size
    target.report["tolerance"] = TOLERANCE[target.dtype]
    if not gap / size <= TOLERANCE[target.dtype]:
        raise UnsupportedTarget(
            f"target {target.spec.name}: passes over draftlab's memory give other logits than "
            f"transformers: relative difference {gap / size:.3g}, expected at most "
            f"{TOLERANCE[target.dtype]}"
        )


def _scales_output(config: dict[str, Any]) -> bool:
    """Tell the first T5 models from later ones; older configs say it by tying the head."""
    if config["model_type"] == "mt5":  # came after them
        return False
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True)))


def _heads(attention: nn.Module, name: str, hidden: Tensor) -> Tensor:
    """Project to keys, values or queries, heads apart: [R, H, T, Dh]."""
    projected = attention.get_submodule(name)(hidden)
    width: Any = attention.key_value_proj_dim
    return projected.unflatten(-1, (-1, width)).transpose(1, 2)


def _attend(
    attention: Any, normed: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Float[Tensor, "R T D"]:
    query = _heads(attention, "q", normed)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=1.0)
    return attention.o(out.transpose(1, 2).flatten(2))


def _groups(prompts: list[list[int]]) -> Iterator[list[int]]:
    """Put prompts of like length together, so that padding stays small."""
    group: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if group and (len(group) + 1) * len(prompts[index]) > _ENCODED_TOGETHER:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
