"""The door to verification: which draft tokens stay, and the token after them.

In: a draft tree, what the target says of it, uniforms. Out: a Verdict. Pure functions: no model, no
cache, no generator. Every rule but those of `rules/lossy.py` leaves the output the target's law.
Read `rules/exact_match.py` first, then `rules/speculative.py`; `choose_rule` says which one runs.
"""

from draftlab.decoding.rules.block import verify_block
from draftlab.decoding.rules.choose import Rule, RuleName, choose_rule
from draftlab.decoding.rules.exact_match import verify_exact_match
from draftlab.decoding.rules.laws import compute_overlaps
from draftlab.decoding.rules.lossy import verify_lossy_threshold, verify_lossy_typical
from draftlab.decoding.rules.speculative import verify_speculative

__all__ = [
    "Rule",
    "RuleName",
    "choose_rule",
    "compute_overlaps",
    "verify_block",
    "verify_exact_match",
    "verify_lossy_threshold",
    "verify_lossy_typical",
    "verify_speculative",
]
