"""What a run leaves behind: its folder, its numbers and their mirrors, and where they came from.

In: resolved settings, and numbers as they arise. Out: files under outputs/. Nothing here imports
torch at top level. Read run_dir.py first.
"""
