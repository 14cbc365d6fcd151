"""Lets these tests use the kits of the rooms they cross."""

import sys
from pathlib import Path

ROOMS = Path(__file__).parent.parent
for room in ("contract", "decoding", "decoding/rules"):
    folder = str(ROOMS / room)
    if folder not in sys.path:
        sys.path.append(folder)
