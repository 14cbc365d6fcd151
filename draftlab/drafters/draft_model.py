"""A draft model: a small causal language model of its own, distilled towards the target.

In: token ids alone. Out: K draft tokens, one forward pass each (arXiv:2211.17192, section 2). It
starts from any small model with the target's tokenizer, or from chosen layers of the target itself,
and learns the target's law at the same positions (forward KL by default, DistillSpec,
arXiv:2310.08461), on all tokens or on those that a reference shows to be learnable (AdaSPEC,
arXiv:2510.19779). It runs over KV buffers of its own through the same door as targets do.

For an encoder-decoder target the draft model is one as well, and stays as it was loaded: it encodes
the prompt once, as the target does.

Read `DraftModel.forward`, then `DraftModel.propose`.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)

from draftlab.data.batch import TokenBatch
from draftlab.drafters._own_memory import CHUNK, FINAL, OwnMemory, Text
from draftlab.drafters._reference import load_reference
from draftlab.drafters._unrolling import sequence_sums
from draftlab.drafters._weighing import Normalise
from draftlab.drafters.base import (
    DraftBudget,
    Drafter,
    DrafterSettings,
    DraftLoss,
    Observation,
    ServingWeights,
)
from draftlab.drafters.layers import fuse
from draftlab.drafters.tree import DraftTree, chain_of_points, chain_parents
from draftlab.errors import ConfigError, NotExportable, TargetMismatch, UnsupportedTarget
from draftlab.objectives.chunked import chunked_losses, chunked_scores
from draftlab.objectives.named import objective
from draftlab.objectives.selection import most_learnable
from draftlab.randomness import Noise
from draftlab.sampling import GREEDY, SamplingRows, draw, greedy_ids, process
from draftlab.shapes import Bool, Float, Int, Tensor
from draftlab.targets.adapter import Door, HFDoor
from draftlab.targets.cache import KVBuffers
from draftlab.targets.encoder_decoder import (
    EncoderDecoderKV,
    EncoderDecoderTarget,
    build_encoder_decoder,
)
from draftlab.targets.fast import FAMILIES, FastDoor, refuse_fast_door
from draftlab.targets.features import FeatureRequest, TargetFeatures
from draftlab.targets.gate import admit
from draftlab.targets.model_view import ModelView
from draftlab.targets.spec import TargetSpec
from draftlab.targets.step import Step
from draftlab.targets.view import TargetView


class DraftModelSettings(DrafterSettings):
    """Keys of conf/drafter/draft_model.yaml.

    Attributes:
        start: layers copies chosen layers of the target; pretrained loads `model`.
        model: folder or hub name, for start=pretrained; None otherwise.
        revision: of a hub model; None is its main one.
        layers: the target's layers to start from, 0-based, for start=layers; None spreads a quarter
            of them evenly, first and last included.
        trainable: all weights, or the decoder layers alone.
        objective: name of the per-token loss, as in draftlab.objectives.
        normalise: sequence gives every answer the same weight; token every token that is learned.
        reference: a frozen copy that tells which tokens are learned: the folder of a trained
            draft_model of the same sizes, or `start`, this model as it starts. Read in training
            alone. None learns all.
        learn_fraction: share of a sequence's tokens to learn, those where the draft is furthest
            behind the reference; None without one.
    """

    start: Literal["layers", "pretrained"]
    model: str | None
    revision: str | None
    layers: list[int] | None
    trainable: Literal["all", "layers"]
    objective: str
    normalise: Normalise
    reference: str | None
    learn_fraction: float | None = Field(gt=0, le=1)

    @model_validator(mode="after")
    def _check_choices(self) -> "DraftModelSettings":
        if (self.reference is None) != (self.learn_fraction is None):
            raise ValueError(
                f"reference={self.reference} with learn_fraction={self.learn_fraction}; expected "
                "both, to learn the tokens that a reference shows to be learnable, or null for both"
            )
        if (self.start == "pretrained") != (self.model is not None):
            raise ValueError(
                f"model={self.model} with start={self.start}; expected a folder or hub name with "
                "start=pretrained, and null with start=layers"
            )
        if self.start == "pretrained" and self.layers is not None:
            raise ValueError(f"layers={self.layers} has no effect with start=pretrained; pass null")
        if self.revision is not None and self.model is None:
            raise ValueError(f"revision={self.revision} has no effect without a model; pass null")
        return self


class _PassingKeys(KVBuffers):
    """Keys and values of the pass in progress alone, gradients and all: training has no past."""

    def __init__(self, slots: int, length: int) -> None:
        """Hold nothing."""
        self.slots = slots
        self.capacity = length

    def flat_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Name no places: nothing is stored."""
        del rows
        return positions

    def write(self, layer: int, flat: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep them until they are read."""
        self._now = (keys, values)

    def read(
        self, layer: int, rows: Tensor, live: int, *, is_prefix: bool
    ) -> tuple[Tensor, Tensor]:
        """Give back what was just written."""
        return self._now


class DraftModel(Drafter, kind="draft_model", settings=DraftModelSettings):
    """A causal language model that drafts token by token."""

    def __init__(self, settings: DraftModelSettings, target: TargetView) -> None:
        """Load or build the model and check that it speaks the target's ids.

        Raises:
            TargetMismatch: another tokenizer, or too few rows for its ids.
            UnsupportedTarget: a model whose cache cannot be rolled back exactly.
        """
        super().__init__()
        self.settings = self._choices = settings
        self.target = target
        self._objective = objective(settings.objective)
        self.averages_tokens = settings.normalise == "token"
        self._references: list[DraftModel] = []  # a list: no module holds it, so nothing trains it
        self._tables: dict[str, Tensor] = {}
        self._encoder_decoder: EncoderDecoderTarget | None = None
        if settings.model and target.config.get("is_encoder_decoder"):
            self.model = _load(settings, target)
            self._encoder_decoder = build_encoder_decoder(
                self.model, target.tokenizer, name=settings.model, source="draft"
            )
            return
        self.model = _load(settings, target) if settings.model else _from_layers(settings, target)
        _choose_trainable(self.model, settings)
        self._door = HFDoor(self.model)
        self._view = ModelView(_spec_of(self._door, settings, target), target.tokenizer, self._door)
        admission = admit(self._door, self._view)
        if admission.kv_shape is None:
            raise UnsupportedTarget(
                f"draft model {self._view.spec.name} cannot draft: {admission.refusal}; choose "
                "another model"
            )
        self._kv_heads, self._head_dim = admission.kv_shape
        self._windows = admission.report["windows"]
        # casting a module casts its rotary table too, and bfloat16 positions are wrong ones
        self._tables = {n: b.clone() for n, b in self.model.named_buffers() if "inv_freq" in n}

    def _apply(self, fn: Any, recurse: bool = True) -> "DraftModel":
        super()._apply(fn, recurse)
        for name, table in self._tables.items():
            buffer = self.model.get_buffer(name)
            buffer.data = table.to(buffer.device)
        return self

    @property
    def needs(self) -> FeatureRequest:
        """Ask for the final hidden state: the target's law is computed from it in training."""
        return FINAL

    def forward(self, batch: TokenBatch, features: TargetFeatures, noise: Noise) -> DraftLoss:
        """Compare the model's law with the target's at the same positions, packed rows kept apart.

        Raises:
            UnsupportedTarget: a model that caps its logits can draft, but is not trained here.
            ConfigError: an encoder-decoder model is not trained here either.
        """
        if self._encoder_decoder is not None:
            raise ConfigError(
                f"draft model {self._encoder_decoder.spec.name} is an encoder-decoder model: "
                "nothing to train, it drafts as it is"
            )
        assert features.final is not None, "`needs` asks for the final hidden state"
        b, s = batch.shifted_mask(1).nonzero(as_tuple=True)  # rows whose next token is learned
        hidden = self._states(batch, b, s)
        matrix, ids = self._head()
        learned = self._learned(batch, features.final, b, s, hidden.detach())
        weights = learned.to(torch.promote_types(hidden.dtype, torch.float32))
        if not self.averages_tokens:
            weights = weights / sequence_sums(batch.segment_ids, b, s, weights)
        scores = chunked_scores(
            self._objective,
            hidden.unsqueeze(0),
            [matrix],
            target_final=features.final[b, s],
            target_head=self.target.head,
            labels=batch.input_ids[b, s + 1],
            weights=weights.unsqueeze(0),
            vocab_ids=ids,
        )
        return DraftLoss(
            scores.total,
            scores.loss_sum,
            scores.hit_sum,
            scores.overlap_sum,
            scores.count,
            weights.sum() if self.averages_tokens else None,
        )

    def train(self, mode: bool = True) -> "DraftModel":
        """Enter or leave training, which alone reads the reference: it is looked for on entering.

        Raises:
            ConfigError: no drafter there that could be the reference.
        """
        super().train(mode)
        if mode and self._encoder_decoder is None:
            self._reference()
        return self

    def _reference(self) -> "DraftModel | None":
        """Load the reference once; None when all tokens are learned."""
        choices = self._choices
        if choices.reference is not None and not self._references:
            if choices.reference == "start":
                plain = choices.model_copy(update={"reference": None, "learn_fraction": None})
                found = DraftModel(plain, self.target).requires_grad_(False).eval()
            else:
                found = load_reference(choices.reference, self.target, kind=self.kind)
            assert isinstance(found, DraftModel)
            own, theirs = self._view.spec, found._view.spec
            sizes = (own.hidden_size, own.vocab_size), (theirs.hidden_size, theirs.vocab_size)
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"reference={choices.reference} has hidden size {sizes[1][0]} and "
                    f"{sizes[1][1]} head rows, this draft model {sizes[0][0]} and {sizes[0][1]}; "
                    "expected a reference of the same sizes"
                )
            weight = _weight_of(self._door.anatomy.head)
            self._references.append(found.to(weight.device, weight.dtype))
        return self._references[0] if self._references else None

    def _learned(
        self,
        batch: TokenBatch,
        final: Float[Tensor, "B T D"],
        b: Int[Tensor, " N"],
        s: Int[Tensor, " N"],
        hidden: Float[Tensor, "N Dd"],
    ) -> Bool[Tensor, " N"]:
        """Choose the tokens to learn: all, unless a reference tells the learnable ones."""
        fraction = self._choices.learn_fraction
        reference = self._reference() if self.training else None
        if reference is None or fraction is None:
            return torch.ones_like(b, dtype=torch.bool)
        with torch.no_grad():
            states = torch.stack([hidden, reference._states(batch, b, s).to(hidden.dtype)])
        matrix, ids = self._head()
        own, theirs = chunked_losses(
            self._objective,
            states,
            [matrix, reference._head()[0]],
            target_final=final[b, s],
            target_head=self.target.head,
            labels=batch.input_ids[b, s + 1],
            vocab_ids=ids,
        )
        stride = int(batch.segment_ids.max()) + 1
        return most_learnable(own, theirs, b * stride + batch.segment_ids[b, s], fraction)

    def _states(
        self, batch: TokenBatch, b: Int[Tensor, " N"], s: Int[Tensor, " N"]
    ) -> Float[Tensor, "N Dd"]:
        """Run the model; give what its LM head reads at the rows asked for."""
        slots, length = batch.input_ids.shape
        step = Step(
            rows=torch.arange(slots, device=batch.input_ids.device),
            ids=batch.input_ids,
            base=torch.zeros(slots, dtype=torch.int64, device=batch.input_ids.device),
            live=length,
            depths=batch.positions,
            segments=batch.segment_ids,
        )
        final = self._door.forward(_PassingKeys(slots, length), step, FINAL, False).features.final
        assert final is not None
        return final[b, s] * self._head_scale()

    def _head(self) -> tuple[Float[Tensor, "C Dd"], Int[Tensor, " C"] | None]:
        """Give the LM head in training, and the target ids of its rows; None when they are all."""
        matrix, known = _weight_of(self._door.anatomy.head), self.target.spec.num_token_ids
        if matrix.shape[0] == self.target.spec.vocab_size:
            return matrix, None
        # rows past the tokenizer's ids are padding, and may be more or fewer than the target's
        return matrix[:known], torch.arange(known, device=matrix.device)

    @torch.inference_mode()
    def open(self, slots: int, capacity: int, kv: KVBuffers) -> OwnMemory:
        """Allocate the model's own keys and values, and lay its weights out as they are now."""
        if self._encoder_decoder is not None:
            return _open_encoder_decoder(self._encoder_decoder, slots, capacity, kv)
        weight = _weight_of(self._door.anatomy.embedding)
        own = KVBuffers(
            num_layers=len(self._door.anatomy.layers),
            num_kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            slots=slots,
            capacity=capacity + CHUNK,
            dtype=weight.dtype,
            device=weight.device,
        )
        door: Door = self._door
        head: Callable[[Tensor], Tensor] = self._view.head
        if refuse_fast_door(self.model, self._view.config) is None:
            door = FastDoor(self.model, self._view.config, self._windows)
            head = fuse(_weight_of(self._door.anatomy.head))
        return OwnMemory(
            [Text() for _ in range(slots)], own, door, head, self._view.spec.max_positions
        )

    @torch.inference_mode()
    def observe(self, state: OwnMemory, seen: Observation) -> None:
        """Append tokens; long prompts are run at once, the last few wait for the next proposal."""
        # the one transfer of ids a round
        rows, lengths = seen.rows.tolist(), seen.lengths.tolist()
        ids, next_ids = seen.ids.tolist(), seen.next_ids.tolist()
        if state.begin is not None:
            new = [s for s, n in zip(rows, lengths, strict=True) if n and not state.texts[s].ids]
            state.begin(new)
        for r, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            text = state.texts[row]
            if length and not text.ids:
                text.ids.append(ids[r][0])
            text.ids.extend(next_ids[r][:length])
            text.settle()
        state.catch_up(rows)

    @torch.inference_mode()
    def propose(
        self, state: OwnMemory, budget: DraftBudget, uniforms: Float[Tensor, "R N"]
    ) -> DraftTree:
        """Draft K tokens one after another; rows past the model's own length draft nothing.

        With `min_confidence` every node tells the model's largest probability at its place, known
        before the token is drawn; drafting ends when no row is that sure.
        """
        depth, rows = budget.num_draft_tokens, budget.rows.tolist()
        device, count = budget.rows.device, len(rows)
        known, width = self.target.spec.num_token_ids, self.target.spec.vocab_size
        able = [i for i, row in enumerate(rows) if state.texts[row].has_room(depth, state.longest)]
        index = torch.tensor(able, dtype=torch.int64, device=device)
        sampling = budget.sampling
        if isinstance(sampling, SamplingRows):
            sampling = sampling.select(able) if able else GREEDY
        laws: list[Tensor] = []
        sure: list[Tensor] = []
        goes_on = torch.ones_like(index, dtype=torch.bool)

        def choose(hidden: Tensor, k: int) -> Tensor | None:
            nonlocal goes_on
            logits = state.head(hidden)[:, :known]
            law = process(logits, sampling) if budget.draws else None
            if budget.min_confidence is not None:
                told = (logits.float().softmax(-1) if law is None else law).amax(-1)
                goes_on = goes_on & (told >= budget.min_confidence)
                if k > 0 and not bool(goes_on.any()):
                    return None
                sure.append(told)
            if law is None:
                return greedy_ids(logits)
            laws.append(law)
            return draw(law, uniforms[index, k])

        found = state.draft([rows[i] for i in able], depth, choose) if able else None
        length = depth if found is None else found.shape[1]
        tokens = torch.zeros(count, length, dtype=torch.int64, device=device)
        confidence = torch.zeros(count, length, device=device) if sure else None
        if found is not None:
            tokens[index] = found
        if confidence is not None:
            confidence[index] = torch.stack(sure, dim=1).to(confidence.dtype)
        num_nodes = torch.zeros(count, dtype=torch.int64, device=device)
        num_nodes[index] = length
        if not budget.draws:
            return replace(chain_of_points(tokens, num_nodes), confidence=confidence)
        law = torch.zeros(
            count, length, width, dtype=laws[0].dtype if laws else torch.float32, device=device
        )
        law[..., 0] = 1.0  # a law of some kind for rows that draft nothing
        if laws:
            law[index, :, :known] = torch.stack(laws, dim=1)
        return DraftTree(
            tokens=tokens,
            parents=chain_parents(count, length, device),
            num_nodes=num_nodes,
            law_probs=law,
            law_ids=None,
            confidence=confidence,
        )

    def close(self, state: OwnMemory, rows: Int[Tensor, " R"]) -> None:
        """Forget these rows; their keys and values are overwritten by the next sequence."""
        for row in rows.tolist():
            state.texts[row] = Text()

    def serving_weights(self) -> ServingWeights:
        """Give the whole model; engines run it as a draft model."""
        plain = self.plain_model()
        return ServingWeights(
            architecture="draft_model", config=plain.config.to_dict(), tensors=plain.state_dict()
        )

    def plain_model(self) -> PreTrainedModel:
        """Build a plain transformers model with the trained weights.

        Raises:
            NotExportable: an encoder-decoder model, which stays as it was loaded.
        """
        if self._encoder_decoder is not None:
            raise NotExportable(
                f"draft model {self._encoder_decoder.spec.name} is an encoder-decoder model, "
                "used as it is; give the engine its folder or hub name instead"
            )
        config = type(self.model.config).from_dict(self.model.config.to_dict())
        with torch.random.fork_rng(devices=[]):  # its random start is overwritten
            plain = AutoModelForCausalLM.from_config(config)
        dtype = _weight_of(self._door.anatomy.head).dtype
        plain.to(dtype).load_state_dict(self.model.state_dict())
        return plain.eval()

    def save_pretrained_folder(self, path: Path) -> None:
        """Write a folder that transformers and engines load by itself: config, weights, tokenizer.

        Args:
            path: replaced as a whole if it exists.
        """
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        self.plain_model().save_pretrained(part)
        self.target.tokenizer.save_pretrained(part)
        if path.exists():
            shutil.rmtree(path)
        os.replace(part, path)

    def _head_scale(self) -> float:
        """What the head multiplies logits with, to be applied to hidden states instead."""
        config = self._view.config
        is_biased = self._door.anatomy.head.bias is not None
        if config.get("final_logit_softcapping") is not None or is_biased:
            raise UnsupportedTarget(
                f"draft model {self._view.spec.name} has a capped or biased LM head; draftlab runs "
                "it but does not train it: choose another model"
            )
        return (config.get("logit_scale") or 1.0) / (config.get("logits_scaling") or 1.0)


def _open_encoder_decoder(
    model: EncoderDecoderTarget, slots: int, capacity: int, target_kv: KVBuffers
) -> OwnMemory:
    """Make memory that encodes a prompt when a sequence begins, as it stands in the target's."""
    assert isinstance(target_kv, EncoderDecoderKV), "the target has an encoder, and its own memory"
    own = model.open_kv(slots, capacity + CHUNK)

    def begin(new: list[int]) -> None:
        model.encode(own, new, [target_kv.prompts[slot] for slot in new])

    texts = [Text() for _ in range(slots)]
    return OwnMemory(texts, own, model.door, model.view.head, model.spec.max_positions, begin)


def _load(settings: DraftModelSettings, target: TargetView) -> PreTrainedModel:
    """Load a model by folder or hub name and check that it speaks the target's ids."""
    name = str(settings.model)
    revision = settings.revision or "main"
    kind, what = AutoModelForCausalLM, "causal"
    if target.config.get("is_encoder_decoder"):
        kind, what = AutoModelForSeq2SeqLM, "sequence-to-sequence"
    try:
        model = kind.from_pretrained(name, revision=revision, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"cannot load draft model {name!r}: {first}; expected a folder or hub name of a "
            f"{what} language model with its tokenizer"
        ) from None
    theirs = tokenizer.get_vocab()
    other = [t for t, i in target.tokenizer.get_vocab().items() if theirs.get(t) != i]
    if other:
        raise TargetMismatch(
            f"draft model {name} and target {target.spec.name} have different tokenizers: "
            f"{len(other)} tokens have other ids, such as {other[0]!r}; choose a draft model "
            "of the target's own family"
        )
    return model


def _from_layers(settings: DraftModelSettings, target: TargetView) -> PreTrainedModel:
    """Build a model from chosen layers of the target, its embedding, final norm and LM head."""
    family = target.config["model_type"]
    if family not in FAMILIES:
        raise ConfigError(
            f"start=layers serves targets of the types {', '.join(FAMILIES)}, and "
            f"{target.spec.name} is {family}; pass start=pretrained model=FOLDER_OR_NAME"
        )
    layers = _spread(target.spec.num_layers) if settings.layers is None else settings.layers
    if not layers or sorted(set(layers) & set(range(target.spec.num_layers))) != layers:
        raise ConfigError(
            f"layers={layers}: expected ascending, distinct numbers in "
            f"0..{target.spec.num_layers - 1}"
        )
    entries = {k: v for k, v in target.config.items() if k not in ("model_type", "dtype")}
    entries["num_hidden_layers"] = len(layers)
    if entries.get("layer_types"):
        entries["layer_types"] = [entries["layer_types"][i] for i in layers]
    config = AutoConfig.for_model(family, **entries)
    with torch.random.fork_rng(devices=[]):  # its random start is overwritten
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    rows = torch.arange(config.vocab_size, device=target.device)
    # far from zero, the norm's epsilon is nothing and what comes out is its weight
    large = torch.full((target.spec.hidden_size,), 1e3, dtype=target.dtype, device=target.device)
    state = {
        "model.embed_tokens.weight": target.embed(rows),
        "model.norm.weight": target.final_norm(large),
        "lm_head.weight": target.head_rows(None),
    }
    for here, there in enumerate(layers):
        for name, weight in target.layer_state(there).items():
            state[f"model.layers.{here}.{name}"] = weight
    model.load_state_dict(state)
    return model


def _spread(num_layers: int) -> list[int]:
    """Choose a quarter of the layers, at least two where there are, first and last included."""
    count = min(num_layers, max(2, num_layers // 4))
    return sorted({round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count)})


def _choose_trainable(model: PreTrainedModel, settings: DraftModelSettings) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # its masks would come from the global generator
    model.requires_grad_(settings.trainable == "all")
    if settings.trainable == "all":
        return
    prefix = f"{model.base_model_prefix}."
    names = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    stem = next(n for n in names if n.removeprefix(prefix) in ("layers", "h"))
    model.get_submodule(stem).requires_grad_(True)


def _spec_of(door: HFDoor, settings: DraftModelSettings, target: TargetView) -> TargetSpec:
    """Describe the draft model as the gate wants it: the target's tokenizer, sizes of its own."""
    config = door.model.config.get_text_config()
    head_rows = _weight_of(door.anatomy.head).shape[0]
    rows = min(head_rows, _weight_of(door.anatomy.embedding).shape[0])
    if rows < target.spec.num_token_ids:
        raise TargetMismatch(
            f"draft model {settings.model or 'from layers'} has {rows} rows for the "
            f"{target.spec.num_token_ids} token ids of target {target.spec.name}; choose a model "
            "with the target's tokenizer"
        )
    return TargetSpec(
        name=settings.model or f"layers of {target.spec.name}",
        source="draft",
        checksum="",  # its weights change in training
        quantisation="none",
        hidden_size=config.hidden_size,
        vocab_size=head_rows,
        num_token_ids=target.spec.num_token_ids,
        num_layers=len(door.anatomy.layers),
        max_positions=config.max_position_embeddings,
        tokenizer_sha256=target.spec.tokenizer_sha256,
        eos_ids=target.spec.eos_ids,
        dtype="float32",
    )


def _weight_of(module: nn.Module) -> Tensor:
    return module.get_parameter("weight")
