"""The commands: one file each, and what they share.

In: words of a command line. Out: an exit code (0 done, 1 failed, 2 wrong config or usage, 3 a
lossless check failed or a gate missed, 4 a gate could not decide, 130 interrupted). Read main.py
first, then schema.py (every setting there is) and launch.py (how a run starts).
"""
