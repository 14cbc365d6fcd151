"""From logits to the law a token is drawn from, and the draw itself.

In: logits, how each row is sampled, and what stands before each place. Out: probabilities, ids,
residuals. One `process` serves the autoregressive baseline, verification and drafters, so p means
one thing everywhere.

Read law.py (what can be asked for), then probabilities.py (what it does to logits), then context.py
(what penalties see).
"""

from draftlab.sampling.context import ContextTracker, TokenContext
from draftlab.sampling.law import GREEDY, Sampling, SamplingRows
from draftlab.sampling.probabilities import adjust, draw, greedy_ids, process, residual

__all__ = [
    "GREEDY",
    "ContextTracker",
    "Sampling",
    "SamplingRows",
    "TokenContext",
    "adjust",
    "draw",
    "greedy_ids",
    "process",
    "residual",
]
