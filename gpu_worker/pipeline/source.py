"""The source: where a restore's rows come from, and whether they were the session's while they were copied.

Used by the reading lane alone, `abort` apart. Worst case: a lease that ended, which `check` says after the
copies; what was copied is then not used.
"""

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ctxcache.client import SessionRows
from ctxcache.client.arena import Bytes
from ctxcache.client.rows import LeasedRows
from ctxcache.format.streams import Stream
from gpu_worker.errors import ShapeMismatch


class RowSource(Protocol):
    """Rows of one session. Tokens are counted from the session's first one."""

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy rows [begin, end) of a stream into [end - begin, row_bytes]. Raises what reading raises."""
        ...

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError."""
        ...

    def check(self) -> None:
        """Raise LeaseNotFound unless all that was filled so far was the session's while it was copied."""
        ...

    def abort(self) -> None:
        """Have a read that waits for the store end soon; from any thread."""
        ...


Verify = Callable[[], None]
"""Raises unless what has landed is right; on a lane of the device, which it may wait for."""


@runtime_checkable
class LandingRows(RowSource, Protocol):
    """A source whose rows need no memory of the host."""

    def land(self, stream: Stream, begin: int, end: int, into: Tensor) -> Verify:
        """Bring rows [begin, end) into [end - begin, row_bytes] on the device, to be verified there.

        The rows are there when the call returns, and right when the returned check has not raised.
        Raises what reading raises; then nothing comes into that memory any more.
        """
        ...


class LeasedSource:
    """Rows that the store's client reads: under a lease in place, or by stream as they arrive."""

    def __init__(self, rows: SessionRows) -> None:
        """`rows` begin at the session's first token, and belong to this source while it restores."""
        self._rows = rows
        self._stream: Stream | None = None
        self._pieces: list[Bytes] = []
        self._begins: list[int] = []

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """See RowSource. Rows that the client verifies again are verified as they are copied."""
        if isinstance(self._rows, LeasedRows) and self._rows.is_verified:
            _check_range(stream, begin, end, self._rows.token_count)
            self._rows.copy_verified(stream, begin, end, into)
            return
        if stream != self._stream:
            self._pieces = list(self._rows.pieces(stream))
            self._begins = [0, *accumulate(map(len, self._pieces))]
            self._stream = stream
        _check_range(stream, begin, end, self._begins[-1])
        at = begin
        index = bisect_right(self._begins, begin) - 1
        while at < end:
            piece, piece_begin = self._pieces[index], self._begins[index]
            until = min(end, self._begins[index + 1])
            # Not by slice assignment of memoryviews, which would hold the GIL.
            np.copyto(into[at - begin : until - begin], piece[at - piece_begin : until - piece_begin])
            at, index = until, index + 1

    def row_bytes(self, stream: Stream) -> int:
        """See RowSource."""
        return self._rows.row_bytes(stream)

    def check(self) -> None:
        """See RowSource."""
        self._rows.check()

    def abort(self) -> None:
        """See RowSource. A lease is kept until the copies under it have ended: its owner gives it back."""
        if not self._rows.is_local:
            self._rows.close()


def _check_range(stream: Stream, begin: int, end: int, count: int) -> None:
    if not 0 <= begin <= end <= count:
        raise ShapeMismatch(what=f"{stream} rows", expected=f"up to {count}", actual=f"[{begin}, {end})")
