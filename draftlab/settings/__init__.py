"""Choosing: yaml from conf/ and recipes/, composed by Hydra into plain data, checked by pydantic.

In: a command's overrides. Out: frozen `Settings`. Read base.py first, then compose.py.
"""
