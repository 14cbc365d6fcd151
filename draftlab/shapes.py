"""Axis legend, and the only import of jaxtyping.

B sequences (slots of a batch) | R rows a call speaks of | T token positions | W width of an
observation | D target width | L tapped layers | V target vocabulary | Vd draft vocabulary |
C support of a draft law | K draft depth | N tree nodes | M = N + 1 verified rows, anchor first |
S verify steps of one generation.

The annotations are checked (by beartype) in tests only; elsewhere they are documentation.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor"]
