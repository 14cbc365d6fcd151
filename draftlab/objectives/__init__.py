"""Two laws in, a number to descend out. Pure functions in float32 or wider.

Read distillation.py, then rows.py (rules of a reduced vocabulary), then chunked.py and pieces.py.
named.py is the menu; weights.py and selection.py say which predictions count, and how much.
"""
