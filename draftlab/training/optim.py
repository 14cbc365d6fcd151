"""Which optimizer moves which weight.

Under muon:

- Muon (torch's, with AdamW-like step sizes: `match_rms_adamw`) for hidden matrices, that is 2-D
  weights that are neither an embedding nor an LM head;
- AdamW at `adamw_lr` for the rest: norms, biases, stacked 3-D weights, embeddings, LM heads.
  A vocabulary's rows are not one linear map of hidden states, so orthogonalising them does harm.

An LM head or embedding is told by its module (`nn.Embedding`), by its name (`lm_head`,
`embed_tokens`) or by a side as long as the target's or the draft vocabulary.

Weight decay holds for weights of two or more dimensions, embeddings excepted.

Adapters are moved by AdamW alone: Muon makes all directions of a matrix's update equally long, and
an adapter's matrix is a product of two thin ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from draftlab.drafters.base import Drafter, DraftVocabSettings
from draftlab.errors import ConfigError
from draftlab.training.settings import OptimSettings

_VOCABULARY_NAMES = ("lm_head", "embed_tokens")


def trainable_parameters(drafter: Drafter) -> dict[str, nn.Parameter]:
    """Give the drafter's trainable parameters by name.

    Raises:
        ConfigError: there is none, so training would do nothing.
    """
    named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError(
            f"drafter kind {drafter.kind!r} has no trainable parameters: there is nothing to "
            "train; use it as it is (draftlab eval), or choose a drafter that learns"
        )
    return named


def build_optimizers(drafter: Drafter, settings: OptimSettings) -> list[Optimizer]:
    """Build one optimizer, or Muon and AdamW side by side; groups remember their peak rate.

    Raises:
        ConfigError: Muon for adapters.
    """
    if drafter.adapter is not None:
        check_adapter_optimizer(settings)
    named = trainable_parameters(drafter)
    embeddings = _embedding_names(drafter)
    vocabularies = _vocabulary_sizes(drafter)
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named.items():
        is_embedding = name in embeddings
        is_hidden = not is_embedding and _is_hidden_matrix(name, parameter, vocabularies)
        if settings.kind == "muon" and is_hidden:
            matrices.append(parameter)
        elif parameter.ndim >= 2 and not is_embedding:
            decayed.append(parameter)
        else:
            plain.append(parameter)
    optimizers: list[Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups: list[dict[str, Any]] = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, settings.weight_decay), (plain, 0.0))
        if params
    ]
    if groups:
        lr = settings.lr if settings.adamw_lr is None else settings.adamw_lr
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=settings.betas))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def check_adapter_optimizer(settings: OptimSettings) -> None:
    """Refuse settings that could not take effect on adapters.

    Raises:
        ConfigError: with what to pass.
    """
    if settings.kind == "muon":
        raise ConfigError(
            f"optim.kind=muon moves whole matrices, and adapters have none: AdamW moves both of "
            f"their factors, so optim.lr={settings.lr:g} of muon would have no effect; pass "
            "optim=adamw"
        )


def set_lr(optimizers: Sequence[Optimizer], factor: float) -> None:
    """Set every group's learning rate to this share of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def _is_hidden_matrix(name: str, parameter: nn.Parameter, vocabularies: set[int]) -> bool:
    return (
        parameter.ndim == 2
        and min(parameter.shape) > 1
        and not any(part in _VOCABULARY_NAMES for part in name.split("."))
        and vocabularies.isdisjoint(parameter.shape)
    )


def _embedding_names(drafter: Drafter) -> set[str]:
    return {
        f"{name}.weight" if name else "weight"
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Embedding)
    }


def _vocabulary_sizes(drafter: Drafter) -> set[int]:
    sizes = {drafter.target.spec.vocab_size}
    settings = drafter.settings
    if isinstance(settings, DraftVocabSettings) and settings.draft_vocab_size is not None:
        sizes.add(settings.draft_vocab_size)
    return sizes
