"""Appending staged rows to one session of the store, a piece at a time.

Rows are written where they will stay: into the arena's room, or into a buffer that goes by stream. Staging
keeps them until they are committed, so that they can be written again after a reservation has ended. Every
reservation asks for the generation that the last commit left: another writer of the session wins. Used by
one thread at a time. Worst case: a store that does not answer holds the thread until the client's deadline.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ctxcache.client import CallerModel, Client, SessionWriter
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CapacityExceeded, ReservationNotFound, TooManyRequests
from ctxcache.format.layout import SEGMENT_TOKENS
from gpu_worker.saving.staging import Bytes, RowRun, Rows, StagingBuffers, cut, rows_of

PIECE_TOKENS = 512
"""Most rows that are written and committed at a time."""
ROOM_TOKENS = 2 * SEGMENT_TOKENS
"""Room that a session which goes on keeps: the segment that is filled, and one ahead."""


# A session's room in the store while a conversation goes on (segments of 64 tokens):
#
#     committed          │ room: two segments                   │
#     0 ............ 200 │ 200 ......... 256 ............ 328    │
#                          rows are written in place, and commits move the border
#
# Room is asked for once in two segments, and what is left of it is given back at the end. Rows that are all
# there get room at once, so that whoever looks at the session meanwhile sees that more is coming.
Cutting = Callable[[SessionInfo, int], SessionInfo]
"""Has a session keep its first tokens alone; returns it as it is then. Raises GenerationMismatch."""


class SessionAppender:
    """Appends rows of `model` to a session that nobody else has changed since it was looked at."""

    def __init__(
        self, client: Client, model: CallerModel, session: SessionInfo, cutting: Cutting | None = None
    ) -> None:
        """`cutting`: in the place of a cut by the session's own call."""
        self._client, self._model, self._cutting = client, model, cutting or self._cut
        self.session = session
        """The session as its last commit left it."""
        self.saved_count = 0
        """How many tokens this appender committed."""
        self.kept_count: int | None = None
        """Tokens that the session keeps before the next rows; None where these follow its last token."""
        self._writer: SessionWriter | None = None
        self._coming_count = 0
        """Rows of the present append that are not committed."""
        self._ends = False
        """Whether no rows follow the present append."""

    def append(
        self, staging: StagingBuffers, runs: Sequence[RowRun], scratch: Bytes, *, is_last: bool
    ) -> None:
        """Write rows and commit them. `is_last`: no rows follow, and the rest of the room is given back.

        Raises what an append raises. `session` tells then how much is committed.
        """
        if self.kept_count is not None and runs:
            self.session = self._cutting(self.session, self.kept_count)
            self.kept_count = None
        self._ends = is_last
        while runs:
            # A piece ends with the room, for a writer does not split one.
            first, runs = cut(runs, min(PIECE_TOKENS, self._room_left))
            count = sum(map(len, first))
            self._coming_count = count + sum(map(len, runs))
            self._append_piece(staging, rows_of(first), count, scratch, is_last=is_last and not runs)

    def _cut(self, session: SessionInfo, token_count: int) -> SessionInfo:
        handle = self._client.sessions.open(session.name)
        return handle.keep_first(token_count, if_generation_match=session.generation)

    def close(self) -> None:
        """Give back the room that was not used."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    @property
    def _room_left(self) -> int:
        """Rows of the open writer's room; a new one has room for any."""
        writer = self._writer
        return (
            PIECE_TOKENS
            if writer is None
            else writer.write_offset + writer.token_count - self.session.token_count
        )

    def _append_piece(
        self, staging: StagingBuffers, rows: Rows, count: int, scratch: Bytes, *, is_last: bool
    ) -> None:
        was_open = self._writer is not None
        try:
            self._write(staging, rows, count, scratch, is_last=is_last)
        except ReservationNotFound:
            # The reservation ended while the session was idle. Nothing is lost unless others wrote since.
            self.close()
            # A reservation that was just made and is gone already would be gone again.
            if not was_open:
                raise
            self._write(staging, rows, count, scratch, is_last=is_last)

    def _write(
        self, staging: StagingBuffers, rows: Rows, count: int, scratch: Bytes, *, is_last: bool
    ) -> None:
        writer = self._writer = self._writer or self._open(count)
        # The writer counts rows from where its room begins.
        begin = self.session.token_count - writer.write_offset
        for stream in staging.specs:
            writer.write(stream, begin, staging.view(stream, rows, scratch))
        self.session = writer.commit(self.session.token_count + count, keep_open=not is_last)
        self.saved_count += count
        if is_last or not self._room_left:
            self._writer = None

    def _open(self, count: int) -> SessionWriter:
        coming = self._coming_count
        room = coming if self._ends else max(coming, ROOM_TOKENS)
        generation = self.session.generation
        try:
            return self._client.sessions.open(self.session, self._model).writer(
                room, if_generation_match=generation, is_all_coming=room == coming
            )
        # Room ahead is a convenience: a store that is short of room gets a smaller request.
        except (CapacityExceeded, TooManyRequests):
            if room == count:
                raise
            return self._client.sessions.open(self.session, self._model).writer(
                count, if_generation_match=generation, is_all_coming=True
            )


def scratch_for(staging: StagingBuffers) -> Bytes:
    """Memory for one thread to put a piece's rows of a stream together."""
    return np.empty(PIECE_TOKENS * staging.widest_bytes, np.uint8)
