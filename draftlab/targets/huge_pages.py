"""Huge pages under weights that every pass reads from end to end.

On common 4 KiB pages a pass over packed weights looks up an address for every page, on a virtual
machine through two tables; on 2 MiB pages it hardly does. Linux gives them on request only
(transparent_hugepage=madvise, the default of most distributions). It is advice: contents never
change, and where the system does not follow it nothing is lost but time.
"""

import ctypes
import sys
from functools import cache
from typing import Any

_HUGE = 2 << 20  # bytes; x86-64 and most of arm64
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h; the second since Linux 6.1


def ask_for_huge_pages(address: int, num_bytes: int) -> int:
    """Ask for huge pages under a piece of memory.

    Whole pages around the piece are asked for: weights lie side by side in memory, so that a page
    mostly holds the end of one and the beginning of the next.

    Args:
        address: where the piece begins.
        num_bytes: its length.

    Returns:
        Bytes that lie on huge pages now, as far as the system says so.
    """
    madvise = _find_madvise()
    if madvise is None or num_bytes < _HUGE // 2:
        return 0
    start, end = address - address % _HUGE, address + num_bytes
    pages = range(start, end, _HUGE)
    for page in pages:  # one by one: a page that reaches beyond what is mapped is refused alone
        madvise(page, _HUGE, _MADV_HUGEPAGE)
    return _HUGE * sum(madvise(page, _HUGE, _MADV_COLLAPSE) == 0 for page in pages)


@cache
def _find_madvise() -> Any:
    """Find the system call, or None where there is none or pages have another size."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
