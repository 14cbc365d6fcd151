"""A trained drafter in, a folder that a serving engine loads out.

Read base.py, then one writer a format.
"""
