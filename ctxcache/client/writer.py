"""Writing layer by layer: what a writer in the arena and one over the wire have in common.

Counts rows, so that a commit never makes a row visible that nobody wrote. Not thread-safe. Worst
case: a writer that is left without a commit leaves the session as it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ctxcache.client.arena import Bytes
from ctxcache.client.shapes import check_complete, view_rows
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Stream, StreamSpec


class SessionWriter(ABC):
    """Room for `token_count` tokens after the session's end. Rows are numbered from 0 at `write_offset`."""

    is_local: bool
    """Whether rows are written in place in the arena."""

    def __init__(self, session: SessionInfo, token_count: int, specs: Mapping[Stream, StreamSpec]) -> None:
        self.session = session
        self.write_offset = session.token_count
        self.token_count = token_count
        self._specs = specs
        self._written = dict.fromkeys(specs, 0)
        self._committed_count = 0
        self._is_open = True

    def write(self, stream: Stream, row_begin: int, rows: npt.NDArray[np.generic]) -> None:
        """Write rows of one stream, [n, row_bytes] or any C-contiguous array of n rows.

        Rows of a stream follow one another; those not yet committed may be written again.
        Raises InvalidArgument, and ReservationNotFound when the room was taken back.
        """
        view = view_rows(stream, rows, self._specs)
        row_end = row_begin + len(view)
        self._check_open()
        if not self._committed_count <= row_begin <= self._written[stream] or row_end > self.token_count:
            problem = f"rows [{row_begin}, {row_end}) of {stream} do not follow row {self._written[stream]}"
            raise InvalidArgument(field="row_begin", problem=problem)
        self._write(stream, row_begin, view)
        self._written[stream] = max(self._written[stream], row_end)

    def commit(
        self,
        token_count: int | None = None,
        durability: Durability = Durability.MEMORY,
        *,
        keep_open: bool = False,
    ) -> SessionInfo:
        """Make rows visible: `token_count` is the session's afterwards, by default all there is room for.

        Returns the session. `keep_open` keeps the rest of the room. Raises IncompleteAppend,
        CapacityExceeded, TierFailure, ReservationNotFound.
        """
        self._check_open()
        row_count = self.token_count if token_count is None else token_count - self.write_offset
        if not self._committed_count < row_count <= self.token_count:
            raise InvalidArgument(field="token_count", problem=f"{token_count} is not within the room")
        check_complete(self._written, self._specs, row_count)
        # Room that is full is nobody's to keep: the session could not be written again.
        keep_open = keep_open and row_count < self.token_count
        self.session = self._commit(row_count, durability, keep_open=keep_open)
        self._committed_count = row_count
        self._is_open = keep_open
        return self.session

    def close(self) -> None:
        """Give back the room that was not committed."""
        if self._is_open:
            self._is_open = False
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @abstractmethod
    def _write(self, stream: Stream, row_begin: int, rows: Bytes) -> None:
        """Take rows that fit, uint8 [n, row_bytes]."""

    @abstractmethod
    def _commit(self, row_count: int, durability: Durability, *, keep_open: bool) -> SessionInfo:
        """Make the first `row_count` rows visible; all of them are written."""

    @abstractmethod
    def _release(self) -> None:
        """Give the room back; whatever is wrong with it, it is gone afterwards."""

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidArgument(field="writer", problem="is closed")
