"""From an objective's name in a yaml to its function."""

from collections.abc import Callable
from dataclasses import dataclass

from draftlab.errors import ConfigError
from draftlab.objectives.acceptance import lk_hybrid, neg_log_acceptance, tv
from draftlab.objectives.cross_entropy import cross_entropy
from draftlab.objectives.distillation import forward_kl, jsd, reverse_kl
from draftlab.shapes import Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """One way to compare a draft law with what it should be.

    Attributes:
        name: as written in a yaml.
        compare: the function: of (log p, log q), or of (log q, columns) when `uses_label`.
        uses_label: True when it learns the data token, not the target's law.
    """

    name: str
    compare: Callable[[Tensor, Tensor], Tensor]
    uses_label: bool = False


_DISTANCES = (forward_kl, reverse_kl, jsd, tv, lk_hybrid, neg_log_acceptance)
OBJECTIVES = {
    "cross_entropy": Objective("cross_entropy", cross_entropy, uses_label=True),
    **{f.__name__: Objective(f.__name__, f) for f in _DISTANCES},
}


def objective(name: str) -> Objective:
    """Look an objective up by its name.

    Raises:
        ConfigError: no such objective, with the known ones.
    """
    if name not in OBJECTIVES:
        raise ConfigError(f"objective={name!r}: expected one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
