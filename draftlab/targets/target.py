"""A frozen target: a step in, logits and hidden states out.

Read Target.run, then Target.read_features. How a pass is computed stands behind one `Door`; the
reference door is transformers' own modules (adapter.py).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from draftlab.data.batch import TokenBatch
from draftlab.errors import TargetMismatch, UnsupportedTarget
from draftlab.shapes import Float, Int, Tensor
from draftlab.targets.adapter import Door, HFDoor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.fast import FastDoor
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.fingerprint import fingerprint_tokenizer, fingerprint_weights
from draftlab.targets.gate import Admission, admit
from draftlab.targets.model_view import ModelView
from draftlab.targets.sharding import LayerShards
from draftlab.targets.spec import TargetSpec
from draftlab.targets.step import Step, StepOutput

T = TypeVar("T")


class Target:
    """A frozen model whose output law must be kept.

    Attributes:
        spec: identity and sizes.
        view: what drafters may use of it.
        drafter_view: the same, on the device that drafters live on.
        tokenizer: the model's own.
        config: the decoder's sizes and switches as plain data.
        device: where the weights are.
        dtype: of the weights.
        speculation_refusal: why a rejected draft could not be taken back exactly, or None. Such a
            target still trains drafters and answers through `forward_plainly`.
        report: what the gate found at load, for provenance and `draftlab doctor`.
        model: the transformers model, frozen.
        reference: the way through transformers' own modules.
        door: the way passes take.
        kv_shape: key heads and head width of our memory; None where it cannot be used.
        shards: of the layers, where they are cut over processes; see sharding.py for what that asks
            of the processes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        spec: TargetSpec,
        *,
        reference: HFDoor,
        view: ModelView,
        admission: Admission,
        door: Door | None = None,
    ) -> None:
        """Put the parts together; `build_target` makes them.

        Args:
            model: frozen.
            tokenizer: the model's own.
            spec: identity and sizes.
            reference: the transformers path.
            view: what drafters may use.
            admission: the gate's answer.
            door: the way passes take; the reference when None.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self.view = view
        self.drafter_view = view
        self.config = view.config
        self.device = view.device
        self.dtype = view.dtype
        self.speculation_refusal = admission.refusal
        self.report: dict[str, Any] = dict(admission.report)
        self.reference = reference
        self.kv_shape = admission.kv_shape
        self.shards: LayerShards | None = None
        self.use_door(door or reference)

    def use_door(self, door: Door) -> None:
        """Choose the way passes take from now on, and note it in the report."""
        self.door = door
        self.view.run_layers_through(door if isinstance(door, FastDoor) else self.reference)
        self.report["kernels"] = door.name

    def place_drafters(self, device: torch.device) -> None:
        """Let drafters that are built or loaded from now on live on another device."""
        self.drafter_view = self.view.on(device)

    def run_on_first(self, action: Callable[[], T], *, is_first: bool) -> T | None:
        """Let the first process do something with this target; all processes come here.

        Where layers are cut over them, the others take part in its passes; else they go on at once.

        Args:
            action: runs passes, any number.
            is_first: this is the first process.

        Returns:
            What the action gave, in the first process; None in the others.
        """
        if self.shards is not None:
            return self.shards.run_on_first(action)
        return action() if is_first else None

    def skip_pass(self) -> None:
        """Run no pass while the other processes run one each; they may need this one's shards."""
        if self.shards is not None:
            self.shards.join()

    def open_kv(self, slots: int, capacity: int) -> KVBuffers:
        """Allocate memory for `slots` sequences of at most `capacity` tokens.

        Raises:
            UnsupportedTarget: this target cannot run over our memory.
        """
        heads, width = self._require_memory()
        with torch.inference_mode():
            return KVBuffers(
                num_layers=self.spec.num_layers,
                num_kv_heads=heads,
                head_dim=width,
                slots=slots,
                capacity=capacity,
                dtype=self.dtype,
                device=self.device,
            )

    def encode(self, kv: KVBuffers, slots: list[int], prompts: list[list[int]]) -> list[list[int]]:
        """Take prompts into their slots; give the tokens that each row decodes from.

        Those are the prompt itself, but for a target with an encoder: it reads the prompt here,
        once, and decoding begins with its start token.
        """
        return prompts

    def run(
        self,
        kv: KVBuffers,
        step: Step,
        *,
        request: FeatureRequest = FeatureRequest(),  # noqa: B008 - frozen
        wants_logits: bool = True,
    ) -> StepOutput:
        """Run new tokens of some rows, for decoding.

        Args:
            kv: made by `open_kv`.
            step: tokens, where they go and what they may see.
            request: hidden states to give back, as inference tensors.
            wants_logits: also compute logits, for every column.

        Raises:
            UnsupportedTarget: see `speculation_refusal`.
        """
        self._require_memory()
        with torch.inference_mode():
            return self.door.forward(kv, step, request, wants_logits)

    def read_features(self, batch: TokenBatch, request: FeatureRequest) -> TargetFeatures:
        """Run packed training rows; no sample sees another.

        Args:
            batch: on any device.
            request: hidden states to give back.

        Returns:
            Normal tensors on the target's device, fit as inputs of autograd.
        """
        request.check(self.spec.num_layers)
        batch = batch.to(self.device)
        if self.kv_shape is None:
            return self._read_features_plainly(batch, request)
        slots, length = batch.input_ids.shape
        step = Step(
            rows=torch.arange(slots, device=self.device),
            ids=batch.input_ids,
            base=torch.zeros(slots, dtype=torch.long, device=self.device),
            live=length,
            depths=batch.positions,
            segments=batch.segment_ids,
        )
        with torch.inference_mode():
            kv = self.open_kv(slots, length)
            features = self.door.forward(kv, step, request, False).features
        return TargetFeatures(taps=_copy(features.taps), final=_copy(features.final))

    def forward_plainly(
        self,
        ids: Int[Tensor, "R T"],
        request: FeatureRequest = FeatureRequest(),  # noqa: B008 - frozen
        *,
        wants_logits: bool = True,
    ) -> StepOutput:
        """Run whole sequences, padded on the right, through transformers alone: no memory of ours.

        Works for every target, also where speculation is refused; slow, as nothing is kept between
        calls. What is right of a sequence's end means nothing.
        """
        was_attached = self.reference.is_attached
        if was_attached:
            self.reference.detach()
        try:
            with torch.inference_mode():
                return self.reference.forward_plainly(ids.to(self.device), request, wants_logits)
        finally:
            if was_attached:
                self.reference.attach()

    def _require_memory(self) -> tuple[int, int]:
        if self.kv_shape is None:
            raise UnsupportedTarget(
                f"target {self.spec.name} cannot decode speculatively: {self.speculation_refusal}; "
                "training, teacher-forced evaluation and plain answering still work"
            )
        return self.kv_shape

    def _read_features_plainly(self, batch: TokenBatch, request: FeatureRequest) -> TargetFeatures:
        """Run each sample alone: where rows or padding could touch each other, none are there."""
        shape = batch.input_ids.shape
        size = self.spec.hidden_size
        taps = torch.zeros(
            *shape, len(request.tap_layers), size, dtype=self.dtype, device=self.device
        )
        final = torch.zeros(*shape, size, dtype=self.dtype, device=self.device)
        for row, segments in enumerate(batch.segment_ids):
            for segment in torch.unique(segments[segments >= 0]).tolist():
                where = (segments == segment).nonzero().squeeze(1)
                ids = batch.input_ids[row, where].unsqueeze(0)
                found = self.forward_plainly(ids, request, wants_logits=False).features
                if found.taps is not None:
                    taps[row, where] = found.taps[0].clone()
                if found.final is not None:
                    final[row, where] = found.final[0].clone()
        return TargetFeatures(
            taps=taps if request.tap_layers else None, final=final if request.wants_final else None
        )


def build_target(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    name: str,
    source: str,
    quantisation: str = "none",
) -> Target:
    """Freeze a model and admit it through the gate.

    Args:
        model: a transformers causal language model, of any mode and attention.
        tokenizer: its tokenizer.
        name: what a person calls the target.
        source: where it came from: hub, local, gguf, demo or tiny.
        quantisation: "none", or in words.

    Raises:
        TargetMismatch: the tokenizer knows ids beyond the model's rows.
        UnsupportedTarget: not a model draftlab can use at all.
    """
    model.eval().requires_grad_(False)
    reference = HFDoor(model)
    spec = describe(model, tokenizer, reference, name, source, quantisation)
    view = ModelView(spec, tokenizer, reference)
    admission = admit(reference, view)
    return Target(model, tokenizer, spec, reference=reference, view=view, admission=admission)


def describe(
    model: PreTrainedModel,
    tokenizer: Any,
    reference: HFDoor,
    name: str,
    source: str,
    quantisation: str,
) -> TargetSpec:
    """Write a model's identity card; refuse a tokenizer with ids that the model has no rows for."""
    config = model.config.get_text_config()
    head, embedding = reference.anatomy.head_weight, reference.anatomy.embedding_weight
    top = max(tokenizer.get_vocab().values())
    for what, rows in (("embedding", embedding.shape[0]), ("LM head", head.shape[0])):
        if top >= rows:
            raise TargetMismatch(
                f"the tokenizer of target {name} knows id {top}, but the model's {what} has "
                f"{rows} rows (ids 0..{rows - 1}); use the tokenizer the model was trained with, "
                "or resize the model's embeddings"
            )
    return TargetSpec(
        name=name,
        source=source,
        checksum=fingerprint_weights(model),
        quantisation=quantisation,
        hidden_size=config.hidden_size,
        vocab_size=head.shape[0],
        num_token_ids=top + 1,
        num_layers=len(reference.anatomy.layers),
        max_positions=_max_positions(config),
        tokenizer_sha256=fingerprint_tokenizer(tokenizer),
        eos_ids=_eos_ids(model, tokenizer),
        dtype=str(head.dtype).removeprefix("torch."),
    )


def _max_positions(config: Any) -> int:
    """Longest exact length: a longrope table changes past the original length (adapter notes)."""
    longest = getattr(config, "max_position_embeddings", None) or 1 << 20
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        longest = min(longest, rope.get("original_max_position_embeddings") or longest)
    return int(longest)


def _eos_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for owner in (model.generation_config, model.config.get_text_config(), tokenizer):
        given: Any = getattr(owner, "eos_token_id", None)
        found.update(given if isinstance(given, list | tuple) else [] if given is None else [given])
    return tuple(sorted(found))


def _copy(features: Float[Tensor, "..."] | None) -> Tensor | None:
    return None if features is None else features.clone()
