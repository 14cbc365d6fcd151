"""Conversations in, token rows with a loss mask out.

Read records.py (what a chat is) and conversations.py (files), then template.py and chat.py (loss
mask), loader.py (a data set prepared once and cached), packing.py and batch.py. answers.py keeps
what the target answered.
Text goes in; only `TokenBatch` and captured features leave towards training.
"""
