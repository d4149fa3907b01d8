"""Touching shared memory ahead of use: a thread of the lowest priority maps page after page.

Knows addresses, not what lies there. The memory must stay mapped until `stop` has returned. Worst
case: a kernel before 5.14 refuses the advice; then nothing is touched and first touches stay dear.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable

STEP_BYTES = 1 << 20
"""Populated at a time: about 0.4 ms in which the process cannot change its mappings."""
_LOWEST_PRIORITY = 19
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Populate:
    """Populates `[address, address + size_bytes)` in a daemon thread, from `start` until it is through or stopped.

    `is_for_writing`: allocate and map pages as a write would; otherwise only map what is allocated.
    `keeps` is what must live on meanwhile. Steps are whole pages: `page_bytes` is a divisor of the range, or 4 KiB.
    """

    def __init__(
        self, address: int, size_bytes: int, *, is_for_writing: bool, page_bytes: int = 4096,
        keeps: object = None, on_end: "Callable[[Populate], None] | None" = None,
    ) -> None:  # fmt: skip
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
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        begin_s = time.monotonic()
        while not self._is_stopped and not self.is_complete and self._step():
            continue
        self.took_s = time.monotonic() - begin_s
        self._keeps = None
        if self._on_end is not None and not self._is_stopped:
            self._on_end(self)

    def _step(self) -> bool:
        size_bytes = min(self._step_bytes, self.size_bytes - self.populated_bytes)
        is_done: bool = _libc.madvise(self._address + self.populated_bytes, size_bytes, self._advice) == 0
        self.populated_bytes += size_bytes * is_done
        return is_done
