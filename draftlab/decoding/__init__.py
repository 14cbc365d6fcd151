"""Prompts in, answers of the target out, faster and unchanged.

Read decoder.py first (the round: draft, verify, commit), then what it calls: proposing.py,
verify.py with the rules behind it, committing.py. Without a drafter the same engine is the
autoregressive baseline.
"""
