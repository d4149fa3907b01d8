"""Memory of this process: what becomes of freed blocks, what a refusal means, and pages touched ahead of use.

glibc gives large blocks back to the kernel as soon as they are freed; a stream of 1 MiB messages then takes
hundreds of page faults a message. So freed memory is kept, and given back when it stays unused. Only glibc
has these settings; with another libc nothing is done. Worst case: a process keeps KEPT_BYTES more than it
uses.

gRPC's C core and RocksDB end the process when an allocation is refused. A bound on the address space that is
too low is therefore refused before they are loaded. Worst case: one of them reaches a higher bound, which
ends the process like a kill; what was durable is there after the next start.

`Populate` maps pages of shared memory from a thread, in short steps with pauses: while the kernel maps, the
process cannot change its mappings. It knows addresses, not what lies there. The memory must stay mapped until
`stop` has returned. Worst case: a kernel before 5.14 refuses the advice; then no page is touched, and first
touches stay dear.
"""

import asyncio
import ctypes
import errno
import gc
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ctxcache.errors import CapacityExceeded, TooManyRequests

HUGE_PAGE_BYTES = 2 << 20
"""The pages of which an arena is made where the machine has set some apart."""

# -- memory that this process frees ------------------------------------------------------------------

# Why a process of this kind has settings of its own, by what happens to a message of 1 MiB:
#
#     glibc's default     mmap, 256 page faults, copy, munmap              each message anew
#     as set here         from the heap, pages there since the last one    no fault
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
YOUNGEST_OBJECTS, MIDDLE_COLLECTIONS, YOUNGER_COLLECTIONS = 100, 2, 2
"""New objects before the youngest generation is collected; such collections before one of the middle, and of
that before a full one.

Each object that stays is looked at once in each generation, however many are looked at together. So small
numbers cost little, and none of the collections takes long: a full one looks at 900 objects. With 2,700 it
took up to 1.3 ms, which showed in a neighbour's p99.
"""
COLLECTIONS_PER_COUNT = 1260
"""Full collections between two counts of what stays: a count takes some milliseconds for a million
objects."""
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

    malloc does not say how much of what it holds free has pages. So it is told to give back when the process
    has stayed for two looks at KEPT_BYTES more than it ever had as its least. Pages that a crowd still uses
    cannot go: it is told again, and more rarely each time that this gives nothing.
    """
    # The least ever is what the process needs at rest; only what stays above it is a leftover.
    least_bytes = own_bytes()
    looks, patience_looks = 0, LEAST_LOOKS
    while can_give_back() and not is_set_by_others():
        await asyncio.sleep(LOOK_INTERVAL_S)
        now_bytes = own_bytes()
        least_bytes = min(least_bytes, now_bytes)
        looks = looks + 1 if now_bytes > least_bytes + KEPT_BYTES else 0
        if looks >= patience_looks:
            # In a thread: malloc looks at every free page, which would hold up the loop.
            await asyncio.to_thread(give_back)
            left_bytes = own_bytes()
            has_helped = now_bytes - left_bytes > KEPT_BYTES
            looks, patience_looks = 0, LEAST_LOOKS if has_helped else min(2 * patience_looks, MOST_LOOKS)
            log.info("memory_given_back before_bytes=%d now_bytes=%d", now_bytes, left_bytes)
        # Back to rest by itself: the next crowd is looked for with fresh patience.
        elif not looks:
            patience_looks = LEAST_LOOKS


def own_bytes() -> int:
    """Memory that this process has for itself: the arena is not among it."""
    # `statm` counts pages. What is shared is subtracted, since the arena is mapped shared.
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Give every free page back to the system."""
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def can_give_back() -> bool:
    """Whether malloc is glibc's."""
    return hasattr(ctypes.CDLL(None), "malloc_trim")


# The life of an object that stays:
#
#     youngest ──► middle ──► oldest ──► full collection ──► frozen: no collection looks at it
#                                                               │ 1260 full collections later, and
#                                                               ▼ twice as many frozen ones
#                                            all are thawed, looked at once, and frozen again
def look_seldom_at_what_stays() -> None:
    """Let a full collection look only at what came since the last one, in a process that only serves.

    A full collection stops everything: for a tenth of a second with a million objects, which one tenant's
    sessions and models may be. Objects that outlived one are not looked at again; it goes when nothing refers
    to it. Objects that refer to each other in a circle do not go by themselves: a call that was under way at
    a collection and was refused leaves some. So everything is looked at once what stays has doubled. Worst
    case: twice as many objects stay as are needed, and GROWTH_OBJECTS.
    """
    # The interpreter's own 10 and 10 would let 70,000 objects gather, which a few registrations of large
    # models make.
    gc.set_threshold(YOUNGEST_OBJECTS, MIDDLE_COLLECTIONS, YOUNGER_COLLECTIONS)
    gc.callbacks.append(WhatStays())


class WhatStays:
    """Called by the collector before and after each collection."""

    def __init__(self) -> None:
        self._limit_count: int | None = None
        """How many objects may stay before all are looked at; None until a collection has looked at all."""
        self._left_count = COLLECTIONS_PER_COUNT

    def __call__(self, phase: str, facts: Mapping[str, int]) -> None:
        """Have the collection look at everything if it is time; then keep what is left from the next ones."""
        if facts["generation"] != FULL_COLLECTION:
            return
        if phase == "start":
            self._left_count -= 1
            if not self._left_count:
                self._left_count = COLLECTIONS_PER_COUNT
                self._thaw_if_grown()
            return
        # Moved to a generation that no collection looks at.
        gc.freeze()
        if self._limit_count is None:
            # Set by the first collection that looked at all: before it, nothing says what really stays.
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


# -- memory that the system refuses ------------------------------------------------------------------

NEEDED_BYTES = 4 << 30
"""Beside the arena: libraries, and what 64 threads' stacks and heaps reserve; little of it is ever used."""
_NO_THREAD = "can't start new thread"


def check_address_space(arena_size_bytes: int) -> None:
    """Raise CapacityExceeded when the bound leaves a server no room."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed_bytes = NEEDED_BYTES + arena_size_bytes
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < needed_bytes:
        raise CapacityExceeded(
            tier="address space (RLIMIT_AS)",
            needed_bytes=needed_bytes,
            free_bytes=limit_bytes,
            limit_bytes=limit_bytes,
        )


# Three ways in which the system says that there is no more memory. None of them is the caller's fault, and a
# server that has been refused once goes on for all others.
def refused_memory(error: BaseException) -> TooManyRequests | None:
    """The refusal for an error that means refused memory, a thread's included; None for any other."""
    is_no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    is_no_mapping = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or is_no_thread or is_no_mapping):
        return None
    return TooManyRequests(what="memory of the server's process", limit="what the system gives it")


# -- shared memory, touched ahead of use -------------------------------------------------------------

STEP_BYTES = 256 << 10
"""Populated at a time: about 0.1 ms in which the process cannot change its mappings."""
_LONGEST_PAUSE_S = 0.01
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


# Why in steps, and with pauses as long as the steps:
#
#     madvise ──── holds the process's mmap lock ──── 0.1 ms for 256 KiB ──► pause ──► next step
#                       └ meanwhile no thread of the process can map, unmap, or start a thread
class Populate:
    """Populates `[address, address + size_bytes)` in a daemon thread, from `start` to the end or `stop`.

    `is_for_writing`: allocate and map pages as a write would; otherwise only map what is allocated. `keeps`
    is what must live on meanwhile. Steps are whole pages: `page_bytes` is a divisor of the range, or 4 KiB.
    """

    def __init__(
        self,
        address: int,
        size_bytes: int,
        *,
        is_for_writing: bool,
        page_bytes: int = 4096,
        keeps: object = None,
        on_end: "Callable[[Populate], None] | None" = None,
    ) -> None:
        self.size_bytes = size_bytes
        self.populated_bytes = 0
        """How far it is: grows to `size_bytes`, or stays where it was stopped or refused."""
        self.took_s = 0.0
        self._address = address
        self._advice = _MADV_POPULATE_WRITE if is_for_writing else _MADV_POPULATE_READ
        self._step_bytes = max(STEP_BYTES, page_bytes)
        self._keeps = keeps
        self._on_end = on_end
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="ctxcache-populate", daemon=True)

    @property
    def is_complete(self) -> bool:
        """Whether every page was touched."""
        return self.populated_bytes == self.size_bytes

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End it; returns when the memory is not touched any more. May be called at any time, and twice."""
        self._is_stopped = True
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        begin_s = time.monotonic()
        while not self._is_stopped and not self.is_complete and self._timed_step():
            continue
        self.took_s = time.monotonic() - begin_s
        # Let go of: the mapping may end with its last view from here on.
        self._keeps = None
        if self._on_end is not None and not self._is_stopped:
            self._on_end(self)

    def _timed_step(self) -> bool:
        """A step, and a pause as long: a thread that never waits loses its processor within a step.

        On a busy machine all that changes the process's mappings would then wait until it is scheduled again.
        A low priority makes that worse.
        """
        begin_s = time.monotonic()
        is_done = self._step()
        time.sleep(min(time.monotonic() - begin_s, _LONGEST_PAUSE_S))
        return is_done

    def _step(self) -> bool:
        size_bytes = min(self._step_bytes, self.size_bytes - self.populated_bytes)
        is_done: bool = _libc.madvise(self._address + self.populated_bytes, size_bytes, self._advice) == 0
        # Counts only what was done: a refusal leaves it where it is, and `is_complete` false.
        self.populated_bytes += size_bytes * is_done
        return is_done
