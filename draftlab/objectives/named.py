"""From an objective's name in a yaml to its function, or to a weighted sum of several.

`forward_kl` is one; `0.1*cross_entropy+0.9*tv` is a sum of two (the mix of DSpark,
arXiv:2607.05147).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from draftlab.errors import ConfigError
from draftlab.objectives.acceptance import lk_hybrid, neg_log_acceptance, tv
from draftlab.objectives.cross_entropy import cross_entropy
from draftlab.objectives.distillation import forward_kl, jsd, reverse_kl, top_k
from draftlab.shapes import Float, Int, Tensor

Distance = Callable[[Tensor, Tensor], Tensor]

_DISTANCES: dict[str, Distance] = {
    f.__name__: f for f in (forward_kl, reverse_kl, jsd, tv, lk_hybrid, neg_log_acceptance, top_k)
}
OBJECTIVES = ("cross_entropy", *_DISTANCES)


@dataclass(frozen=True, slots=True)
class Objective:
    """One way to compare a draft law with what it should be.

    Attributes:
        name: as written in a yaml.
        parts: weight and name of every part of the sum.
    """

    name: str
    parts: tuple[tuple[float, str], ...]

    def compare(
        self,
        log_p: Float[Tensor, "N C"],
        log_q: Float[Tensor, "N C"],
        columns: Int[Tensor, " N"],
    ) -> Float[Tensor, " N"]:
        """Compute the loss of every row.

        Args:
            log_p: the law to learn.
            log_q: the draft's law.
            columns: column of the data token, -1 where q has none for it.
        """
        total = None
        for weight, name in self.parts:
            if name == "cross_entropy":
                losses = cross_entropy(log_q, columns)
            else:
                losses = _DISTANCES[name](log_p, log_q)
            if weight != 1:
                losses = weight * losses
            total = losses if total is None else total + losses
        assert total is not None, "an objective has at least one part"
        return total


def objective(name: str) -> Objective:
    """Look an objective up by its name, or build a sum from `weight*name+weight*name`.

    Raises:
        ConfigError: no such objective, with the known ones, or a weight that is none.
    """
    parts = tuple(_part(piece.strip(), name) for piece in name.split("+"))
    names = [part for _, part in parts]
    if len(set(names)) < len(names):
        raise ConfigError(f"objective={name!r}: a part is named twice; give it one weight")
    return Objective(name, parts)


def _part(piece: str, whole: str) -> tuple[float, str]:
    weight, star, name = piece.rpartition("*")
    name = name.strip()
    if name not in OBJECTIVES:
        part = "" if piece == whole else f"{name!r} is no objective; "
        raise ConfigError(
            f"objective={whole!r}: {part}expected one of {', '.join(OBJECTIVES)}, or a sum such as "
            "0.1*cross_entropy+0.9*tv"
        )
    try:
        value = float(weight) if star else 1.0
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"objective={whole!r}: weight {weight!r} of {name} is no positive number")
    return value, name
