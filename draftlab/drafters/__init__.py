"""Everything that proposes tokens, under one contract.

Read base.py, then tree.py, then any drafter: each is one file. In: observations of the target. Out:
draft trees, and a loss when training.
"""
