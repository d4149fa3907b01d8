"""A lane: one session's way from staging into the store, the second stage.

Rows are written where they will stay (in the arena's room, or in a buffer that goes by stream), then
committed; until then staging has them, so that a reservation that ended is opened again and they are written
once more. Room is kept open ahead of decoding. Every reservation asks for the generation that this lane left:
whoever changed the session meanwhile wins. Used by one thread at a time. Worst case: what the store refused
is lost, and nothing behind it is written.
"""

from collections.abc import Sequence

import numpy as np

from ctxcache.client import CallerModel, Client, SessionWriter
from ctxcache.errors import CapacityExceeded, ReservationNotFound, TooManyRequests
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.v1.session_pb2 import Session
from gpu_worker.saving.slices import Rows, Run, cut, rows_of
from gpu_worker.saving.staging import Bytes, Staging

PIECE_TOKENS = 512
"""Most rows that are written and committed at a time."""
ROOM_TOKENS = 2 * SEGMENT_TOKENS
"""Room that a session which goes on keeps: the segment that is filled, and one ahead."""


class Lane:
    """Appends rows of `model` out of `staging` to a session, as it was when it was last looked at."""

    def __init__(self, client: Client, model: CallerModel, session: Session) -> None:
        self._client, self._model = client, model
        self.session = session
        """As its last commit left it."""
        self._writer: SessionWriter | None = None

    def append(self, staging: Staging, runs: Sequence[Run], scratch: Bytes, *, is_last: bool) -> None:
        """Write rows and commit them. `is_last`: none follow, the rest of the room is given back.

        Raises what an append raises; what is committed then, `session` says.
        """
        while runs:
            first, runs = cut(runs, min(PIECE_TOKENS, self._room_left))
            self._append_piece(
                staging, rows_of(first), sum(map(len, first)), scratch, is_last=is_last and not runs
            )

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
        self, staging: Staging, rows: Rows, count: int, scratch: Bytes, *, is_last: bool
    ) -> None:
        was_open = self._writer is not None
        try:
            self._write(staging, rows, count, scratch, is_last=is_last)
        except ReservationNotFound:
            # It ended by itself, while the session was idle: unless somebody else came, nothing is lost.
            self.close()
            if not was_open:
                raise
            self._write(staging, rows, count, scratch, is_last=is_last)

    def _write(self, staging: Staging, rows: Rows, count: int, scratch: Bytes, *, is_last: bool) -> None:
        writer = self._writer = self._writer or self._open(count, is_last=is_last)
        begin = self.session.token_count - writer.write_offset
        for stream in staging.specs:
            writer.write(stream, begin, staging.view(stream, rows, scratch))
        self.session = writer.commit(self.session.token_count + count, keep_open=not is_last)
        if is_last or not self._room_left:
            self._writer = None

    def _open(self, count: int, *, is_last: bool) -> SessionWriter:
        room = count if is_last else max(count, ROOM_TOKENS)
        generation = self.session.generation
        try:
            return self._client.writer(self.session, self._model, room, if_generation_match=generation)
        except (CapacityExceeded, TooManyRequests):
            if room == count:
                raise
            return self._client.writer(self.session, self._model, count, if_generation_match=generation)


def scratch_for(staging: Staging) -> Bytes:
    """Memory for one thread to put a piece's rows of a stream together."""
    return np.empty(PIECE_TOKENS * staging.widest_bytes, np.uint8)
