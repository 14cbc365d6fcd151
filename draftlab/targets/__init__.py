"""A frozen model in; logits, taps and KV memory out.

Read target.py, then step.py and cache.py; adapter.py alone knows transformers.
"""
