"""Freed buffers stay with the process: glibc hands large ones back to the system, and every piece would fault its
pages in again (a million page faults for a gigabyte, more time than the arithmetic takes).
"""

from __future__ import annotations

import ctypes
import sys

#: mallopt parameters of glibc's malloc.h, and values: the largest threshold that it takes, and "never".
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD, _NEVER = 32 << 20, 2**31 - 1


def keep_freed_buffers() -> None:
    """Let malloc reuse what was freed. Does nothing where the C library has no mallopt."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
