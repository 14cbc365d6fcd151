"""Bytes that captured hidden states will take, known before anything is loaded or written.

The drafter is built for a target of the same shape whose weights hold no memory, and asked what it
reads; so no kind of drafter is named here.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftlab.cli.schema import RunSettings
from draftlab.data.feature_bytes import bytes_of_vector
from draftlab.drafters.base import DrafterSettings, DraftVocabSettings
from draftlab.drafters.store import build_drafter
from draftlab.errors import DraftlabError
from draftlab.targets.adapter import HFDoor
from draftlab.targets.features import FeatureRequest
from draftlab.targets.load import resolve
from draftlab.targets.model_view import ModelView
from draftlab.targets.settings import TargetSettings
from draftlab.targets.spec import TargetSpec
from draftlab.targets.tiny import build_tiny_model

_DEMO: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def bytes_of_token(needs: FeatureRequest, width: int, settings: RunSettings) -> int:
    """Count the bytes that one token's hidden states take in a file, exactly.

    Args:
        needs: hidden states that are kept.
        width: D of the target.
        settings: what they are written in, and the target's dtype.
    """
    number = torch.empty(0, dtype=getattr(torch, resolve(settings.target).dtype))
    vector = bytes_of_vector(width, settings.regenerate.features_dtype, number.element_size())
    return vector * (len(needs.tap_layers) + needs.wants_final)


def foresee_needs(drafter: DrafterSettings, target: TargetSettings) -> FeatureRequest | None:
    """Find what a drafter will read of a target that lies on this machine, without its weights.

    Returns:
        None where only the target itself can tell.
    """
    config = _config_of(target)
    if config is None:
        return None
    if isinstance(drafter, DraftVocabSettings):
        drafter = drafter.model_copy(update={"draft_vocab_size": None})
    try:
        with torch.device("meta"):
            return build_drafter(drafter, _shape_of(config)).needs
    except (DraftlabError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # it computes with weights while it is built


def _config_of(target: TargetSettings) -> Any:
    if target.source == "tiny":
        return build_tiny_model(target.family, torch.float32, target.seed).config
    if target.source == "demo":
        return AutoConfig.for_model("llama", **_DEMO)
    if target.source == "local" and target.name:
        try:
            return AutoConfig.from_pretrained(Path(target.name).expanduser())
        except (OSError, ValueError):
            return None  # a family with code of its own: loading the target will say more
    return None


def _shape_of(config: Any) -> ModelView:
    reference = HFDoor(AutoModelForCausalLM.from_config(config))
    decoder = config.get_text_config()
    spec = TargetSpec(
        name=decoder.model_type,
        source="local",
        checksum="",
        quantisation="none",
        hidden_size=decoder.hidden_size,
        vocab_size=decoder.vocab_size,
        num_token_ids=decoder.vocab_size,
        num_layers=len(reference.anatomy.layers),
        max_positions=decoder.max_position_embeddings,
        tokenizer_sha256="",
        eos_ids=(),
        dtype="float32",
    )
    return ModelView(spec, None, reference)
