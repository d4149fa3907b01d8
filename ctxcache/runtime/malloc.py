"""What this process does with memory it frees: keeps it, so that the next message finds it mapped.

glibc gives large blocks back to the kernel as soon as they are freed, and a stream of 1 MiB messages
then takes hundreds of page faults per message. Only glibc knows these settings; elsewhere nothing is
done. Free memory that stays unused for a while is given back all the same. Worst case: a process keeps KEPT_BYTES more
than it uses.
"""

import asyncio
import ctypes
import gc
import logging
import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "CTXCACHE_MALLOC"
MMAP_THRESHOLD_BYTES = 32 << 20
"""Smaller blocks come from memory that is kept; the most that glibc takes."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""So much free memory is kept at the end of the heap."""
TOP_PAD_BYTES = 64 << 20
"""How much more than needed the heap grows at a time."""
KEPT_BYTES = 128 << 20
"""Free memory that a server keeps for what comes next."""
LOOK_INTERVAL_S = 10.0
LEAST_LOOKS, MOST_LOOKS = 2, 64
"""Looks that find too much before free memory is given back: at first, and where that gave nothing."""
log = logging.getLogger(__name__)
COLLECTIONS_PER_COUNT = 16
"""Full collections between two counts of what stays: a count takes some milliseconds for a million objects."""
GROWTH_OBJECTS = 200_000
"""By how many objects more than twice as many what stays may grow before it is looked at."""
FULL_COLLECTION = 2
"""The oldest generation."""
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


async def give_back_unused() -> None:
    """Give back, for ever, what a crowd of large requests has left; ends by cancellation.

    malloc does not say how much of what it holds free has pages. So it is told to give back when the process has
    stayed for two looks at KEPT_BYTES more than it ever had as its least. What a crowd still uses cannot go: it is
    told again, and more rarely each time that this gives nothing.
    """
    least_bytes = own_bytes()
    looks, patience_looks = 0, LEAST_LOOKS
    while can_give_back() and not is_set_by_others():
        await asyncio.sleep(LOOK_INTERVAL_S)
        now_bytes = own_bytes()
        least_bytes = min(least_bytes, now_bytes)
        looks = looks + 1 if now_bytes > least_bytes + KEPT_BYTES else 0
        if looks >= patience_looks:
            await asyncio.to_thread(give_back)
            left_bytes = own_bytes()
            has_helped = now_bytes - left_bytes > KEPT_BYTES
            looks, patience_looks = 0, LEAST_LOOKS if has_helped else min(2 * patience_looks, MOST_LOOKS)
            log.info("memory_given_back before_bytes=%d now_bytes=%d", now_bytes, left_bytes)
        elif not looks:
            patience_looks = LEAST_LOOKS


def own_bytes() -> int:
    """Memory that this process has for itself: the arena is not among it."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Give every free page back to the system."""
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def can_give_back() -> bool:
    """Whether malloc is glibc's."""
    return hasattr(ctypes.CDLL(None), "malloc_trim")


def look_seldom_at_what_stays() -> None:
    """Let a full collection look at what came since the last one alone, in a process that is nothing but a server.

    A full collection stops everything: for a tenth of a second with a million objects, which one tenant's
    sessions and models may be. What outlived one is not looked at again; it goes when nothing refers to it.
    Objects that refer to each other in a circle do not go by themselves: a call that was under way at a collection
    and was refused leaves some. So everything is looked at once what stays has doubled. Worst case: twice as many
    objects stay as are needed, and GROWTH_OBJECTS.
    """
    gc.callbacks.append(WhatStays())


class WhatStays:
    """Called by the collector before and after each collection."""

    def __init__(self) -> None:
        self._limit_count: int | None = None
        """How many objects may stay before all are looked at; None until a collection has looked at all."""
        self._left_count = COLLECTIONS_PER_COUNT

    def __call__(self, phase: str, facts: Mapping[str, int]) -> None:
        """Have the collection look at everything if it is time; afterwards, keep what is left from the next ones."""
        if facts["generation"] != FULL_COLLECTION:
            return
        if phase == "start":
            self._left_count -= 1
            if not self._left_count:
                self._left_count = COLLECTIONS_PER_COUNT
                self._thaw_if_grown()
            return
        gc.freeze()
        if self._limit_count is None:
            self._limit_count = 2 * gc.get_freeze_count() + GROWTH_OBJECTS

    def _thaw_if_grown(self) -> None:
        if self._limit_count is not None and gc.get_freeze_count() > self._limit_count:
            gc.unfreeze()
            self._limit_count = None


def is_set_by_others() -> bool:
    """Whether the environment has settings for malloc, or says to leave it alone."""
    own = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    is_tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    return is_tuned or os.environ.get(VARIABLE) == "default" or any(name in os.environ for name in own)
