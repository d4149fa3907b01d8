"""Threads: pools whose threads all run from the start, and short time slices from the kernel.

A caller that starts a thread waits until the thread says that it runs. A thread that finds no memory dies
before that, and the event loop would wait for ever: so no thread of a pool begins in service. Worst case: a
start that fails.

A server's threads wake often and work briefly, beside engines and clients that compute without pause. With
the usual slice of some milliseconds they wait for those; a shorter slice is a nearer deadline (EEVDF, Linux
6.12 and later). It needs no privilege and takes nothing from others' share. Worst case: an older kernel,
where nothing changes.
"""

import ctypes
import os
import platform
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose `count` threads run. Raises RuntimeError when they cannot be had."""
    pool = ThreadPoolExecutor(count, name)
    all_run = threading.Barrier(count + 1)
    try:
        # `submit` starts a thread only when none is idle, so each of these waits at the barrier until all are
        # there.
        for _ in range(count):
            pool.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        pool.shutdown()
        raise
    all_run.wait()
    return pool


SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep the interpreter while another waits for it. By itself it is ten times that: so
long a thread that writes records would hold up the event loop."""


def switch_threads_often() -> None:
    """Have no thread of this process keep the interpreter for long."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


SLICE_NS = 100_000
"""The shortest that the kernel takes."""
# By number: neither Python nor glibc has a function for it.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period."""
_KEEP_POLICY = 0x08


def shorten_time_slices() -> bool:
    """Ask for short slices for this thread and those that it starts; returns whether the kernel agreed.

    Policy and niceness stay what they are; real-time policies have no slices to shorten.
    """
    number = _SCHED_SETATTR.get(platform.machine()) if platform.system() == "Linux" else None
    syscall = getattr(ctypes.CDLL(None), "syscall", None)
    if number is None or syscall is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # For a thread of normal policy `runtime` is the slice that it asks for.
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, 0, _KEEP_POLICY, nice, 0, SLICE_NS, 0, 0)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return bool(syscall(number, 0, buffer, 0) == 0)
