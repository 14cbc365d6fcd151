"""A decoder and prompts in, honest numbers out.

Read acceptance.py, speed.py and lossless.py, then suite.py, which runs them by domain.
"""
