"""Conversations in, token rows with a loss mask out.

Read conversations.py (files to chats), then chat.py (template and loss mask), loader.py (a data set
prepared once and cached), packing.py and batch.py. answers.py keeps what the target answered.
Text goes in; only `TokenBatch` and captured features leave towards training.
"""
