"""An append under way, whichever transport carries it: what has arrived, and what may come next.

Knows no wire. Used by one task or thread at a time. Worst case: an append that is given up shows
nothing of what its last commit did not cover.
"""

from ctxcache.cache.appends import Appends, Reservation
from ctxcache.core.ledger.session import SessionView
from ctxcache.errors import (
    CacheError,
    IncompleteAppend,
    InvalidArgument,
    ReservationNotFound,
    SessionNotFound,
    WriteOffsetMismatch,
)
from ctxcache.format.streams import Stream
from ctxcache.service import validate
from ctxcache.v1 import session_pb2

CHUNK_BYTES_LIMIT = 2 << 20


async def begin_append(writing: Appends, header: session_pb2.AppendHeader, tenant: str) -> "Append":
    """Open the reservation that an append's header asks for. Raises as `Appends.reserve` does, InvalidArgument."""
    generation = header.if_generation_match if header.HasField("if_generation_match") else None
    reservation = await writing.reserve(
        tenant,
        validate.session_id(header.name, "header.name"),
        fingerprint=validate.fingerprint(header.model_fingerprint, "header.model_fingerprint"),
        write_offset=header.write_offset,
        generation=generation,
        token_count=0,
    )
    return Append(writing, reservation)


class Append:
    """What has come of an append: `received` is one past the last token of each stream."""

    def __init__(self, writing: Appends, reservation: Reservation) -> None:
        self._writing = writing
        self.reservation = reservation
        self.layout = reservation.session.layout
        self.received = {spec.stream: reservation.committed for spec in self.layout.specs}
        self.view: SessionView = reservation.session.view()

    def check(self, stream: Stream, token_begin: int, size_bytes: int) -> int:
        """One past the last token of a chunk. Raises what is wrong with it, its bytes aside."""
        if stream not in self.received:
            raise InvalidArgument(field="chunk.stream", problem=f"the session does not store {stream}")
        row_bytes = self.layout.row_bytes(stream)
        validate.within(size_bytes, 1, CHUNK_BYTES_LIMIT, "chunk.data")
        if size_bytes % row_bytes:
            raise InvalidArgument(field="chunk.data", problem=f"is not a multiple of {row_bytes} bytes")
        if token_begin != self.received[stream]:
            name = self.reservation.session.name
            raise WriteOffsetMismatch(
                session=f"{name} {stream}", token_count=self.received[stream], write_offset=token_begin
            )
        return token_begin + size_bytes // row_bytes

    async def make_room(self, token_end: int) -> None:
        """Let the reservation live on, and reach that token. Raises as `Appends.extend` does."""
        try:
            self._writing.renew(self.reservation)
            await self._writing.extend(self.reservation, max(token_end - self.reservation.end, 0))
        except ReservationNotFound as error:
            raise self._cut_off() from error

    async def commit(self, request: session_pb2.AppendCommit) -> None:
        """Make tokens visible. Raises IncompleteAppend, InvalidArgument and as `Appends.commit` does."""
        validate.within(request.token_count, self.reservation.committed, 2**62, "commit.token_count")
        self._check_received(request.token_count)
        is_durable = validate.is_durable(request.durability, "commit.durability")
        try:
            self._writing.renew(self.reservation)
            self.view = await self._writing.commit(
                self.reservation, request.token_count, is_durable=is_durable, keep_open=True
            )
        except ReservationNotFound as error:
            raise self._cut_off() from error

    def check_finished(self) -> None:
        """Raise IncompleteAppend when rows came after the last commit."""
        committed = self.reservation.committed
        for stream, end in self.received.items():
            if end > committed:
                raise IncompleteAppend(stream=str(stream), row_count=end, token_count=committed)

    def release(self) -> None:
        """Give back what was not committed."""
        self._writing.release(self.reservation)

    def _check_received(self, token_count: int) -> None:
        for stream, end in self.received.items():
            if end < token_count:
                raise IncompleteAppend(stream=str(stream), row_count=end, token_count=token_count)

    def _cut_off(self) -> CacheError:
        """Why the reservation ended under the writer: what it has to know to go on."""
        session = self.reservation.session
        if session.is_gone:
            return SessionNotFound(session=session.name)
        return WriteOffsetMismatch(
            session=session.name, token_count=session.token_count, write_offset=self.reservation.committed
        )
