"""Token rows and target features in, a trained drafter out.

Read trainer.py, then optim.py and checkpoints.py.
"""
