"""A target without its weights: what its config tells, as modules that hold no numbers.

In: `TargetSettings`. Out: `Outline`, or None where only loading the target can tell. The modules
are transformers' own on the meta device, so sizes are counted, not computed by formulas, and the
gate's first questions are asked. Read find_outline.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from draftlab.errors import ConfigError, DraftlabError, UnsupportedTarget
from draftlab.targets.adapter import HFDoor
from draftlab.targets.encoder_decoder import FAMILIES as ENCODER_DECODERS
from draftlab.targets.fast import refuse_fast_door
from draftlab.targets.gate import refusal_of_config
from draftlab.targets.model_view import ModelView
from draftlab.targets.published import PublishedModel, published_model
from draftlab.targets.settings import TargetSettings
from draftlab.targets.spec import TargetSpec
from draftlab.targets.tiny import build_tiny_model

_DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the demo is this model in another number format
_STACKED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_HUB_S = 3.0  # to answer; longer is as good as not there


@dataclass(frozen=True, slots=True)
class Outline:
    """A target as its config tells it.

    Attributes:
        name: hub id, folder, or kind of a target made in process.
        origin: where the config is from, in words.
        card: what is published about the model, where a recipe names it.
        has_encoder: it reads a prompt with an encoder, so it decodes and trains nothing.
        view: sizes and empty modules, as drafters see them.
        num_parameters: all weights.
        num_decoder: weights that a decoded token may pass, the LM head included; not the table of
            embeddings, of which it reads a row, and nothing that looks at images.
        num_active: of those, what one token passes: in a mixture of experts, the chosen ones.
        num_in_layers: weights of the decoder layers.
        num_experts_weights: those of the experts, all of them; 0 without a mixture.
        experts: (chosen, in all) of a layer; (1, 1) without a mixture.
        num_layers: decoder layers.
        kv_width: numbers that all layers together remember of a token.
        layer_width: numbers that a layer computes for a token.
        matrix_sides: inputs and outputs of all matrices of the decoder layers, added up.
        num_fused: weights that the fast pass keeps a second time on a GPU; 0 where it does not
            serve the model.
        num_packed: the same on a CPU.
        refusal: why rejected drafts could not be taken back exactly, as far as the config tells.
    """

    name: str
    origin: str
    card: PublishedModel | None
    has_encoder: bool
    view: ModelView
    num_parameters: int
    num_decoder: int
    num_active: int
    num_in_layers: int
    num_experts_weights: int
    experts: tuple[int, int]
    num_layers: int
    kv_width: int
    layer_width: int
    matrix_sides: int
    num_fused: int
    num_packed: int
    refusal: str | None

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.view.spec.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, rows of the LM head."""
        return self.view.spec.vocab_size


def find_outline(settings: TargetSettings, *, asks_hub: bool) -> Outline | None:
    """Find out what a target is without its weights.

    Args:
        settings: of any source.
        asks_hub: for a hub target, fetch its config.json (a few kilobytes) if the hub answers;
            False looks into the hub's cache and at published facts only.

    Returns:
        None for GGUF files, for models with code of their own, and for hub models of which nothing
        is known here.

    Raises:
        ConfigError: no such folder or hub model.
        UnsupportedTarget: quantised weights, or a model without an LM head.
    """
    match settings.source:
        case "tiny":
            model = build_tiny_model(settings.family, torch.float32, settings.seed)
            return _outline(f"tiny-{settings.family}", model.config, "made in process")
        case "demo":
            card = published_model(_DEMO)
            assert card is not None, "shipped with the package"
            return _outline("demo", _config_of(card.config), "the shipped model's", card)
        case "local":
            return _of_folder(str(settings.name))
        case "hub":
            return _of_hub(str(settings.name), settings.revision, asks_hub)
        case "gguf":
            return None


def _of_folder(name: str) -> Outline | None:
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"target.name={name} has no config.json; give a folder that transformers can load, or "
            "target=hub target.name=OWNER/NAME"
        )
    return _of_entries(name, _read_entries(path), "its config.json")


def _of_hub(name: str, revision: str | None, asks_hub: bool) -> Outline | None:
    card = published_model(name)
    found = _ask_hub(name, revision, may_fetch=asks_hub, is_known=card is not None)
    if found is not None:
        return _of_entries(name, _read_entries(found), "its config.json on the hub", card)
    if card is None:
        return None
    origin = "published ones" + "; the hub gave no config.json" * asks_hub
    return _of_entries(name, card.config, origin, card)


def _ask_hub(name: str, revision: str | None, *, may_fetch: bool, is_known: bool) -> Path | None:
    """Find a model's config.json in the hub's cache or, if it answers at once, on the hub."""
    from huggingface_hub import (
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if may_fetch:
        try:
            url = hf_hub_url(name, "config.json", revision=revision)
            get_hf_file_metadata(url, timeout=_HUB_S)  # asks once, where a download would go on
            return Path(hf_hub_download(name, "config.json", revision=revision))
        except GatedRepoError:
            pass  # the card, if there is one, tells the sizes, and check says what to do
        except RepositoryNotFoundError:
            if not is_known:
                raise ConfigError(
                    f"the hub has no model {name!r} that you may see; check target.name, and for "
                    "private models HF_TOKEN"
                ) from None
        except Exception:
            pass  # no network, in the words of whatever HTTP library is installed
    cached = try_to_load_from_cache(name, "config.json", revision=revision or "main")
    return Path(cached) if isinstance(cached, str) else None


def _read_entries(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch it again") from None
    if not isinstance(entries, dict):
        raise ConfigError(f"{path} holds {type(entries).__name__}, expected a config's keys")
    return entries


def _of_entries(
    name: str, entries: dict[str, Any], origin: str, card: PublishedModel | None = None
) -> Outline | None:
    quantisation = entries.get("quantization_config")
    if quantisation:
        raise UnsupportedTarget(
            f"target {name} is quantised ({quantisation.get('quant_method', 'unknown')}); draftlab "
            "runs plain weights: name the unquantised model, or a dequantised copy"
        )
    try:
        config = _config_of(entries)
    except Exception:
        return None  # code of its own, or a config that is wrong: loading the target says which
    return _outline(name, config, origin, card)


def _config_of(entries: dict[str, Any]) -> Any:
    rest = {key: value for key, value in entries.items() if key != "model_type"}
    return AutoConfig.for_model(entries["model_type"], **rest)


def _outline(
    name: str, config: Any, origin: str, card: PublishedModel | None = None
) -> Outline | None:
    has_encoder = bool(config.is_encoder_decoder) and config.model_type in ENCODER_DECODERS
    kind = AutoModelForSeq2SeqLM if has_encoder else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = kind.from_config(config)
            door = HFDoor(model)
    except DraftlabError:
        raise
    except Exception:
        return None  # not a language model by its class, or one that computes while it is built
    view = ModelView(_spec_of(config, door), None, door)
    anatomy = door.anatomy
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    chosen, among = _experts_of(config.get_text_config()) if experts else (1, 1)
    embedding = anatomy.embedding_weight.numel()
    decoder = sum(p.numel() for p in {*anatomy.base.parameters(), anatomy.head_weight})
    if anatomy.head_weight is not anatomy.embedding_weight:
        decoder -= embedding
    heads, width = view.config["num_key_value_heads"], view.config["head_dim"]
    fused, packed = _copies_of(model, view, anatomy.layers)
    return Outline(
        name=name,
        origin=origin,
        card=card,
        has_encoder=has_encoder,
        view=view,
        num_parameters=sum(p.numel() for p in model.parameters()) + _untied_head(config, embedding),
        num_decoder=decoder,
        num_active=decoder - experts * (among - chosen) // among,
        num_in_layers=sum(p.numel() for p in anatomy.layers.parameters()),
        num_experts_weights=experts,
        experts=(chosen, among),
        num_layers=len(anatomy.layers),
        kv_width=2 * heads * width * len(anatomy.layers),
        layer_width=_layer_width(view.config, chosen),
        matrix_sides=sum(
            m.in_features + m.out_features
            for m in anatomy.layers.modules()
            if isinstance(m, nn.Linear)
        ),
        num_fused=fused,
        num_packed=packed,
        refusal=None if has_encoder else refusal_of_config(door),
    )


def _untied_head(config: Any, embedding: int) -> int:
    """Count T5's LM head where transformers builds it tied and the weights then untie it."""
    return embedding if getattr(config, "scale_decoder_outputs", True) is False else 0


def _spec_of(config: Any, door: HFDoor) -> TargetSpec:
    decoder = config.get_text_config()
    rows = door.anatomy.head_weight.shape[0]
    return TargetSpec(
        name=decoder.model_type,
        source="local",
        checksum="",
        quantisation="none",
        hidden_size=decoder.hidden_size,
        vocab_size=rows,
        num_token_ids=rows,
        num_layers=len(door.anatomy.layers),
        max_positions=getattr(decoder, "max_position_embeddings", None) or 1 << 20,
        tokenizer_sha256="",
        eos_ids=(),
        dtype="float32",
    )


def _experts_of(config: Any) -> tuple[int, int]:
    """Read how many experts a token passes in a layer, and how many there are."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    among = next((n for name in names if (n := getattr(config, name, None))), 1)
    return min(getattr(config, "num_experts_per_tok", None) or 1, among), among


def _copies_of(model: nn.Module, view: ModelView, layers: nn.ModuleList) -> tuple[int, int]:
    """Count the weights that targets/fast.py stacks, and those that it lays out anew on a CPU."""
    if refuse_fast_door(model, view.config) is not None:
        return 0, 0
    sizes = [(n.split(".")[-2], p.numel()) for n, p in layers.named_parameters() if p.ndim == 2]
    return (
        sum(size for name, size in sizes if name in _STACKED),
        sum(size for _, size in sizes) + view.spec.vocab_size * view.spec.hidden_size,
    )


def _layer_width(config: dict[str, Any], chosen: int) -> int:
    """Count what a layer computes for a token: norms and residuals, attention, the MLP."""
    width, head = config["hidden_size"], config["head_dim"]
    attention = (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head
    inner = config.get("moe_intermediate_size") or config.get("d_ff")
    inner = inner or config["intermediate_size"]
    return 4 * width + attention + 3 * chosen * inner
