"""Copies off the device: the first stage, one copy per stream for a whole batch.

On a GPU they go over a stream of their own: it waits for what computed the rows, nothing waits for it.
Three rules hold them in order. A row's memory is not given to another tensor before its copy has ended
(`record_stream`); the host reads no row before the mark behind its copy is done; and no row of a staging
buffer is handed out again before that. Whoever overwrites rows in place (a graph that is replayed, a fused
add and norm) waits for the mark first. Worst case: the device fails, and no mark behind that is ever done.
"""

import time
from typing import Protocol

import torch
from torch import Tensor

from ctxcache.errors import DeadlineExceeded
from gpu_worker.errors import DeviceFailed

_POLL_S = 0.0002


class Mark(Protocol):
    """A point behind all copies so far."""

    def is_done(self) -> bool:
        """Whether they have ended. Raises DeviceFailed."""
        ...


class Copies(Protocol):
    """The way of rows to the host. Used by one thread; marks from any."""

    def copy(self, target: Tensor, rows: Tensor) -> None:
        """Begin to copy rows into `target` on the host. Raises RuntimeError for a device that failed."""
        ...

    def mark(self) -> Mark:
        """A mark behind all copies that were begun."""
        ...


class HostCopies:
    """Rows that are on the host: copied at once."""

    def copy(self, target: Tensor, rows: Tensor) -> None:
        """See Copies."""
        target.copy_(rows)

    def mark(self) -> Mark:
        """See Copies."""
        return _DONE


class CudaCopies:
    """Rows on a GPU: copied into pinned memory over a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, rows: Tensor) -> None:
        """See Copies."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(rows, non_blocking=True)
        rows.record_stream(self._stream)

    def mark(self) -> Mark:
        """See Copies."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event)


def copies_from(device: torch.device) -> Copies:
    """The way from a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


def wait_done(mark: Mark, timeout_s: float) -> None:
    """Wait until a mark is done. Raises DeviceFailed, DeadlineExceeded."""
    deadline_s = time.monotonic() + timeout_s
    while not mark.is_done():
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(target="a copy from the device", timeout_s=str(timeout_s))
        # An event's own wait has no deadline.
        time.sleep(_POLL_S)


class _Done:
    def is_done(self) -> bool:
        return True


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceFailed(problem=str(error)) from error


_DONE = _Done()
