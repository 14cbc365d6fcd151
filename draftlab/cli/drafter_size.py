"""How large a drafter is, before there is one: built on the meta device for an empty target.

No kind is named here but the draft model, which is a language model of its own.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from draftlab.drafters.base import Drafter, DrafterSettings, DraftVocabSettings
from draftlab.drafters.draft_model import DraftModelSettings
from draftlab.drafters.store import build_drafter
from draftlab.errors import DraftlabError
from draftlab.targets.features import FeatureRequest
from draftlab.targets.outline import Outline, find_outline
from draftlab.targets.settings import TargetSettings

_FINAL = FeatureRequest(wants_final=True)


@dataclass(frozen=True, slots=True)
class DrafterSize:
    """Sizes of a drafter.

    Attributes:
        needs: hidden states it reads of the target.
        num_parameters: all of its own weights; none of the target's.
        num_trainable: those that training moves.
        num_matrices: of those, the hidden matrices, for which Muon keeps one number instead of two.
        num_multiplied: weights that a token passes, LM heads left out.
        num_kept: numbers that a token's pass keeps for the backward pass, at inputs and outputs
            of matrices.
        num_heads: LM heads of its own that are trained.
        width: numbers that an LM head reads.
        num_layers: layers that training may compute twice.
        kv_width: numbers that a draft model remembers of a token; 0 for heads, which keep little.
    """

    needs: FeatureRequest
    num_parameters: int
    num_trainable: int
    num_matrices: int
    num_multiplied: int
    num_kept: int
    num_heads: int
    width: int
    num_layers: int
    kv_width: int = 0


def build_empty_drafter(drafter: DrafterSettings, outline: Outline) -> Drafter | None:
    """Build a drafter whose weights hold no memory; None where it computes with weights by then."""
    if isinstance(drafter, DraftVocabSettings):
        drafter = drafter.model_copy(update={"draft_vocab_size": None})
    try:
        with torch.device("meta"):
            return build_drafter(drafter, outline.view)
    except (DraftlabError, RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def find_drafter_size(
    drafter: DrafterSettings, outline: Outline, target: TargetSettings, *, asks_hub: bool
) -> DrafterSize | None:
    """Find out how large a drafter will be.

    Args:
        drafter: of any kind.
        outline: the target it is for.
        target: the target's settings, for where draft models are looked up.
        asks_hub: see `find_outline`.

    Returns:
        None where only building it can tell.
    """
    if name := getattr(drafter, "model", None):
        source = "local" if str(name).startswith((".", "/", "~")) else "hub"
        revision = getattr(drafter, "revision", None)
        where = {"source": source, "name": name, "revision": revision}
        found = find_outline(target.model_copy(update=where), asks_hub=asks_hub)
        return None if found is None else _size_of_model(drafter, found, outline)
    if isinstance(drafter, DraftModelSettings):
        return _size_of_layers(drafter, outline)
    empty = build_empty_drafter(drafter, outline)
    if empty is None:
        return None
    vocab_size = outline.vocab_size
    trained = [p for p in empty.parameters() if p.requires_grad]
    linears = [m for m in empty.modules() if isinstance(m, nn.Linear)]
    heads = [m for m in linears if m.out_features == vocab_size]
    body = [m for m in linears if m.out_features != vocab_size]
    # built with a row for every token: heads lose those outside the draft vocabulary
    kept = getattr(drafter, "draft_vocab_size", None) or vocab_size
    lost = sum((vocab_size - kept) * m.in_features for m in heads)
    return DrafterSize(
        needs=empty.needs,
        num_parameters=sum(p.numel() for p in empty.parameters()) - lost,
        num_trainable=sum(p.numel() for p in trained) - lost,
        num_matrices=sum(p.numel() for p in trained if _is_hidden(p, vocab_size)),
        num_multiplied=sum(m.in_features * m.out_features for m in body),
        num_kept=sum(m.in_features + m.out_features for m in body),
        num_heads=len(heads),
        width=outline.hidden_size,
        num_layers=getattr(drafter, "num_layers", None) or 1,
    )


def _size_of_model(drafter: DrafterSettings, model: Outline, target: Outline) -> DrafterSize:
    """Size a language model that is loaded to draft; with an encoder it stays as it is."""
    total = model.num_parameters
    layers = model.num_in_layers
    choice = "none"
    if isinstance(drafter, DraftModelSettings) and not target.has_encoder:
        choice = drafter.trainable
    trained = {"all": total, "layers": layers, "none": 0}[choice]
    return DrafterSize(
        needs=_FINAL if trained else FeatureRequest(),
        num_parameters=total,
        num_trainable=trained,
        num_matrices=min(trained, layers),
        num_multiplied=layers,
        num_kept=model.matrix_sides,
        num_heads=int(choice == "all"),
        width=model.hidden_size,
        num_layers=model.num_layers,
        kv_width=model.kv_width,
    )


def _size_of_layers(drafter: DraftModelSettings, target: Outline) -> DrafterSize:
    """Size a draft model made of some of the target's layers, its embedding and its head."""
    most = target.num_layers
    count = min(most, max(2, most // 4)) if drafter.layers is None else len(drafter.layers)
    rows = target.vocab_size * target.hidden_size
    layers = target.num_in_layers * count // most
    tables = rows if target.view.config.get("tie_word_embeddings") else 2 * rows
    total = layers + tables + target.num_decoder - target.num_in_layers - rows  # the final norm
    num_trained = {"all": total, "layers": layers}[drafter.trainable]
    return DrafterSize(
        needs=_FINAL,
        num_parameters=total,
        num_trainable=num_trained,
        num_matrices=min(num_trained, layers),
        num_multiplied=layers,
        num_kept=target.matrix_sides * count // most,
        num_heads=int(drafter.trainable == "all"),
        width=target.hidden_size,
        num_layers=count,
        kv_width=target.kv_width * count // most,
    )


def with_adapters(size: DrafterSize, rank: int) -> DrafterSize:
    """Size a drafter that keeps its weights and trains adapters beside its matrices."""
    num_trained = rank * size.num_kept  # both factors of a matrix have its sides
    return replace(size, num_trainable=num_trained, num_matrices=0, num_heads=0)


def _is_hidden(parameter: nn.Parameter, vocab_size: int) -> bool:
    return parameter.ndim == 2 and vocab_size not in parameter.shape
