"""What this process does with memory it frees: keeps it, so that the next message finds it mapped.

glibc gives large blocks back to the kernel as soon as they are freed, and a stream of 1 MiB messages
then takes hundreds of page faults per message. Only glibc knows these settings; elsewhere nothing is
done. Worst case: a process keeps the most memory that it ever used at one time.
"""

import ctypes
import os

VARIABLE = "CTXCACHE_MALLOC"
MMAP_THRESHOLD_BYTES = 32 << 20
"""Smaller blocks come from memory that is kept; the most that glibc takes."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""So much free memory is kept at the end of the heap."""
TOP_PAD_BYTES = 64 << 20
"""How much more than needed the heap grows at a time."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed; returns whether it does.

    Does nothing where malloc is not glibc's, or where somebody has said otherwise: by glibc's own
    MALLOC_ variables or GLIBC_TUNABLES, or by CTXCACHE_MALLOC=default.
    """
    if is_set_by_others():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return False
    return all(
        mallopt(ctypes.c_int(name), ctypes.c_int(value))
        for name, value in (
            (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
            (_M_TOP_PAD, TOP_PAD_BYTES),
        )
    )


def is_set_by_others() -> bool:
    """Whether the environment has settings for malloc, or says to leave it alone."""
    own = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    is_tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return is_tuned or os.environ.get(VARIABLE) == "default" or any(name in os.environ for name in own)
