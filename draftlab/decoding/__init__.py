"""Prompts in, answers of the target out, faster and unchanged.

Read rules.py (what is accepted), then decoder.py (the round: draft, verify, commit). Without a
drafter the same engine is the autoregressive baseline.
"""
