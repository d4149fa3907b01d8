"""One connection of the bulk channel, in a thread of its own: frames in, frames out, rows in place.

    the connection's thread                          the event loop, which owns the cache
    BulkConnection: receives, verifies, sends   ──►  Transfers: lease, reserve, commit
                                                ◄──  lent: pieces to read, room to write

A connection is let in by a ticket, which OpenBulk issued: an id to find it by, and a secret that is compared
in constant time. It has one use and a short life, and there is a bounded number of them.

All of a transfer is coroutines that the thread waits for; between two of them the thread touches only what
was lent to it. Every wait has a deadline. Worst case: the peer stalls or speaks no frames; the connection
ends, and with it all that it held.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from ctxcache.cache import Cache
from ctxcache.cache.held_rows import Bounce, Lent, Summed
from ctxcache.cache.leases import Lease, ReadRequest
from ctxcache.cache.reservations import Room
from ctxcache.cache.scrubbing import TRIES
from ctxcache.core.ledger.work import at_work
from ctxcache.core.limits import Bound
from ctxcache.errors import (
    CacheError,
    ChecksumMismatch,
    CorruptSegment,
    InvalidArgument,
    PermissionDenied,
    TooManyRequests,
    Unauthenticated,
)
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.streams import Stream, StreamRange
from ctxcache.identity import Role
from ctxcache.runtime.clock import Clock
from ctxcache.runtime.memory import refused_memory
from ctxcache.service import convert, validate
from ctxcache.service.admission import Admission
from ctxcache.service.callers import Caller, Identification, Properties
from ctxcache.service.rows import (
    CHUNK_BYTES_LIMIT,
    MESSAGE_BYTES,
    Append,
    begin_append,
    read_header,
    read_request,
)
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.v1 import bulk_pb2, session_pb2
from ctxcache.wire.framed_socket import (
    PARTS_LIMIT,
    VERSION,
    FramedSocket,
    FrameError,
    Part,
    SocketFrame,
    SocketFrameKind,
)
from ctxcache.wire.status import to_status

# The frames of one connection:
#
#     client                            server
#     HELLO ticket, version       ──►   used up, right or wrong
#                                 ◄──   WELCOME
#     READ                        ──►
#                                 ◄──   READ_HEADER, CHUNK ..., END
#     APPEND header               ──►
#     CHUNK ..., COMMIT, ...      ──►   placed where they belong as they come in
#     FINISH                      ──►
#                                 ◄──   APPENDED, or ERROR at any time: what is on its way is passed over
log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 120
"""How long a connection may wait for its next request."""
SILENCE_TIMEOUT_S = 300.0
"""How long a writer may be silent between two frames: as long as a reservation lasts."""
RENEW_INTERVAL_S = 60.0
TICKET_LIFETIME_NS = 30 * 10**9
TICKET_LIMIT = 1024
"""Tickets that wait to be used, of all tenants."""
ID_BYTES, SECRET_BYTES = 8, 24
T = TypeVar("T")
M = TypeVar("M", bound=Message)


# -- on the event loop ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Issued:
    secret: bytes
    caller: Caller
    deadline_ns: int


class Tickets:
    """Tickets issued and not used yet, oldest first."""

    def __init__(self, clock: Clock, *, are_divided: bool = False) -> None:
        self._clock = clock
        self._bound = Bound(TICKET_LIMIT, are_divided)
        self._issued: dict[bytes, _Issued] = {}

    def issue(self, caller: Caller) -> bytes:
        """Make a ticket for one connection of that caller. Raises TooManyRequests."""
        now_ns = self._clock.monotonic_ns()
        self._forget_past(now_ns)
        # Counted, not remembered: at most 1,024 are there.
        own = sum(issued.caller.tenant == caller.tenant for issued in self._issued.values())
        if self._bound.is_reached(len(self._issued), own):
            raise TooManyRequests(what="bulk tickets", limit=TICKET_LIMIT)
        ticket_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._issued[ticket_id] = _Issued(secret, caller, now_ns + TICKET_LIFETIME_NS)
        return ticket_id + secret

    def use(self, ticket: bytes) -> Caller:
        """End a ticket, good or not, and return whose it was. Raises Unauthenticated."""
        self._forget_past(self._clock.monotonic_ns())
        # The first use ends it, right or wrong, and compares in constant time: a secret cannot be guessed in
        # steps.
        issued = self._issued.pop(ticket[:ID_BYTES], None)
        if issued is None or not hmac.compare_digest(issued.secret, ticket[ID_BYTES:]):
            raise Unauthenticated
        # The caller's token may have been removed since the ticket was issued.
        issued.caller.check()
        return issued.caller

    def _forget_past(self, now_ns: int) -> None:
        for ticket_id, issued in list(self._issued.items()):
            # Oldest first: the first one that holds ends the look.
            if issued.deadline_ns > now_ns:
                return
            del self._issued[ticket_id]


class ReadTransfer:
    """A read under way: its lease, and pieces lent until `close`."""

    def __init__(self, cache: Cache, whereabouts: Whereabouts) -> None:
        self._whereabouts = whereabouts
        self._reading, self._clock = cache.leases, cache.state.clock
        self._held = AsyncExitStack()
        self._bounce = Bounce()
        self.lease: Lease
        self.header: session_pb2.ReadHeader
        self.streams: tuple[Stream, ...]
        self.pieces: tuple[Lent, ...]

    async def open(self, request: session_pb2.ReadSessionRequest, caller: Caller, calls: Admission) -> None:
        """Hold what is asked for. Raises what ReadSession raises."""
        async with AsyncExitStack() as held:
            caller.check()
            # Counted before anything is leased: a refused call has moved nothing. A peer has taken a session
            # over, and would lose it: its connection is counted, and nothing else.
            if caller.grant.role is not Role.PEER:
                held.enter_context(calls.enter(caller.tenant))
            asked, streams = await self._asked(request, caller)
            lease, chosen, _ = await held.enter_async_context(self._reading.stream(asked, streams))
            self.lease, self.streams = lease, tuple(chosen)
            # Held besides the lease: the thread reads while the loop may end the lease.
            self.pieces = held.enter_context(self._reading.lend(lease))
            self.header = read_header(lease, streams, self._clock)
            # Only now: a failure above lets go of the lease and of the place among calls.
            self._held = held.pop_all()

    async def _asked(
        self, request: session_pb2.ReadSessionRequest, caller: Caller
    ) -> tuple[ReadRequest, Sequence[StreamRange]]:
        # A peer reads what it was told by name; no other caller can name it.
        if caller.grant.role is Role.PEER:
            return read_request(request, caller.tenant, is_guest=True)
        asked, streams = read_request(request, caller.tenant)
        await self._whereabouts.come(caller.tenant, asked.session_id)
        return asked, streams

    async def read_past(self, lent: Lent, stream: Stream) -> Summed:
        """Rows of a piece that is not in DRAM, valid until the next call. Raises as `Leases.read_past`."""
        return await self._reading.read_past(self.lease, lent.piece, stream, self._bounce)

    async def mend(self, lent: Lent) -> None:
        """DRAM has other rows of a piece than it should. Raises CorruptSegment, TierFailure."""
        await self._reading.mend(lent.piece.segment)

    async def renew(self) -> None:
        """Let it live on. Raises DeadlineExceeded."""
        self._reading.renew(self.lease)

    async def close(self) -> None:
        """Let go of everything."""
        await self._held.aclose()


class AppendTransfer:
    """An append under way: its reservation, and the room lent of it until the next commit."""

    def __init__(self, cache: Cache, whereabouts: Whereabouts = ALONE, *, is_guest: bool = False) -> None:
        """`is_guest`: of a session without a name, which the fleet lets come."""
        self._whereabouts, self._is_guest = whereabouts, is_guest
        self._writing, self._clock = cache.appends, cache.state.clock
        self._held = ExitStack()
        self._lent = ExitStack()
        self.append: Append

    async def open(self, header: session_pb2.AppendHeader, caller: Caller, calls: Admission) -> None:
        """Begin. Raises what AppendSession raises for its header."""
        with ExitStack() as held:
            caller.check()
            # The same order as for reads.
            held.enter_context(calls.enter(caller.tenant))
            if caller.grant.role is Role.PEER:
                raise PermissionDenied(subject=caller.subject, problem="a peer reads, and appends nothing")
            self.append = await begin_append(
                self._writing, header, caller.tenant, self._whereabouts, is_guest=self._is_guest
            )
            held.callback(self.append.release)
            self._held = held.pop_all()

    async def room(self, token_end: int) -> Room:
        """Room up to that token at least; what was lent before is not any more.

        Raises as `Append.make_room`.
        """
        # Room lent before is taken back, for its views end where the new room begins.
        await self.take_back()
        await self.append.make_room(token_end)
        return self._lent.enter_context(self._writing.lend(self.append.reservation))

    async def take_back(self) -> None:
        """The lent descriptor is lent no more."""
        self._lent.close()

    async def commit(self, request: session_pb2.AppendCommit) -> None:
        """See Append.commit. Takes the room back."""
        await self.take_back()
        await self.append.commit(request)

    async def close(self) -> None:
        """Give back what was not committed."""
        self._lent.close()
        self._held.close()

    async def finish(self) -> session_pb2.AppendSessionResponse:
        """Close, and answer. Raises IncompleteAppend."""
        # Closed first: rows without a commit give their room back before the refusal.
        await self.close()
        self.append.check_finished()
        return session_pb2.AppendSessionResponse(
            session=convert.session_message(self.append.view, self._clock)
        )


class Transfers:
    """Begins transfers. Owned by the event loop."""

    def __init__(
        self,
        cache: Cache,
        calls: Admission,
        connections: Admission,
        tickets: Tickets,
        identification: Identification,
        whereabouts: Whereabouts,
    ) -> None:
        self._whereabouts = whereabouts
        self._cache, self._calls, self._connections, self._tickets = cache, calls, connections, tickets
        self._identification = identification

    async def let_in(self, ticket: bytes, properties: Properties, entered: ExitStack) -> Caller:
        """Use a ticket up; the connection counts as its tenant's until `entered` is closed.

        `properties`: what the connection proves. Raises Unauthenticated, TooManyRequests.
        """
        # Counted when it is known whose it is; before that the listener's own limit counts.
        caller = self._tickets.use(ticket)
        # A ticket that was seen on its way is worth nothing without its owner's certificate.
        self._identification.check_certificate(caller, properties)
        entered.enter_context(self._connections.enter(caller.tenant))
        return caller

    async def leave(self, entered: ExitStack) -> None:
        """The connection is over."""
        entered.close()

    async def read(self, request: session_pb2.ReadSessionRequest, caller: Caller) -> ReadTransfer:
        """Begin a read. Raises what ReadSession raises."""
        transfer = ReadTransfer(self._cache, self._whereabouts)
        await transfer.open(request, caller, self._calls)
        return transfer

    async def append(self, header: session_pb2.AppendHeader, caller: Caller) -> AppendTransfer:
        """Begin an append. Raises what AppendSession raises for its header."""
        transfer = AppendTransfer(self._cache, self._whereabouts)
        await transfer.open(header, caller, self._calls)
        return transfer


# -- in the connection's thread ---------------------------------------------------------------------


class BulkConnection:
    """Serves requests one after the other until the peer ends."""

    def __init__(
        self,
        framed: FramedSocket,
        transfers: Transfers,
        loop: asyncio.AbstractEventLoop,
        properties: Properties = MappingProxyType({}),
    ) -> None:
        """`properties`: what the connection proves of its peer."""
        self._framed, self._transfers, self._loop = framed, transfers, loop
        self._properties = properties
        self._entered = contextlib.ExitStack()
        """Its place in the count of calls; the event loop's."""
        self.is_draining = False
        self.is_busy = False
        self.is_known = False
        """Whether its peer was let in."""
        self._is_unfinished = False

    def serve(self) -> None:
        """Run to the end; raises nothing."""
        try:
            caller = self._greet()
            # One request after the other: a connection has one lease or one reservation at a time.
            while caller is not None and (frame := self._next_request()) is not None:
                self._answer(frame, caller)
        except FrameError as error:
            log.info("bulk_connection_ended problem=%s", error)
        except Exception:  # the edge: nothing may end a thread in silence
            log.exception("bulk_connection_broken")
        finally:
            self._framed.close()
            # On the event loop, whose count it is.
            self._await(self._transfers.leave(self._entered))

    def _greet(self) -> Caller | None:
        # A connection that says nothing has a deadline, and gives way to others, see `BulkListener`.
        if not self._framed.wait(HELLO_TIMEOUT_S) or (frame := self._framed.receive()) is None:
            return None
        try:
            caller = self._check_hello(frame)
        except CacheError as error:
            self._refuse(error)
            return None
        self.is_known = True
        welcome = bulk_pb2.BulkWelcome(version=VERSION)
        welcome.idle_timeout.FromSeconds(IDLE_TIMEOUT_S)
        self._framed.send(SocketFrameKind.WELCOME, welcome.SerializeToString())
        return caller

    def _check_hello(self, frame: SocketFrame) -> Caller:
        if frame.kind is not SocketFrameKind.HELLO:
            raise InvalidArgument(field="hello", problem="the first frame must be HELLO")
        hello = _parse(bulk_pb2.BulkHello, frame)
        caller = self._await(self._transfers.let_in(hello.ticket, self._properties, self._entered))
        # After the ticket, which is used up even where the version is refused.
        if hello.version != VERSION:
            raise InvalidArgument(field="version", problem=f"{hello.version} is not {VERSION}")
        return caller

    def _next_request(self) -> SocketFrame | None:
        self.is_busy = False
        # In a drain no further request is begun. A request that is under way is finished.
        if self.is_draining or not self._framed.wait(IDLE_TIMEOUT_S):
            return None
        self.is_busy = True
        return self._framed.receive()

    def _answer(self, frame: SocketFrame, caller: Caller) -> None:
        # Set before it is carried out: a refusal must know that more frames of it are coming.
        self._is_unfinished = frame.kind is SocketFrameKind.APPEND
        try:
            self._carry_out(frame, caller)
        except CacheError as error:
            self._refuse(error)
            # More of the append is on its way: its frames would be taken for requests.
            self._skip()
        except FrameError:
            raise
        except Exception as error:
            # Refused memory passes; anything else ends the connection with a log line.
            refusal = refused_memory(error)
            self._refuse(refusal or CacheError())
            if refusal is None:
                raise
            self._skip()

    def _carry_out(self, frame: SocketFrame, caller: Caller) -> None:
        if frame.kind is SocketFrameKind.READ:
            self._read(_parse(session_pb2.ReadSessionRequest, frame), caller)
        elif frame.kind is SocketFrameKind.APPEND:
            self._append(_parse(session_pb2.AppendHeader, frame), caller)
        else:
            raise InvalidArgument(field="frame", problem=f"{frame.kind.name} is no request")

    def _refuse(self, error: CacheError) -> None:
        self._framed.send(SocketFrameKind.ERROR, to_status(error).SerializeToString())

    def _skip(self) -> None:
        """After an append failed: pass over what the peer had on its way, up to FINISH."""
        deadline = time.monotonic() + SILENCE_TIMEOUT_S
        while self._is_unfinished:
            if time.monotonic() > deadline:
                raise FrameError("an append that failed is not finished")
            self._next_part(deadline)

    # -- reads ---------------------------------------------------------------------------------------

    def _read(self, request: session_pb2.ReadSessionRequest, caller: Caller) -> None:
        transfer = self._await(self._transfers.read(request, caller))
        with self._closing(transfer.close):
            self._framed.send(SocketFrameKind.READ_HEADER, transfer.header.SerializeToString())
            for message, data in chunks(transfer, self._await):
                self._framed.send(SocketFrameKind.CHUNK, message, data)
                # The kernel lets a thread that computes go on for milliseconds. A reader that wakes up
                # on this host would contend with the next frame for the lock of the socket.
                os.sched_yield()
        # Behind the close: a reader that has END holds nothing in the store any more.
        self._framed.send(SocketFrameKind.END)

    # -- appends -------------------------------------------------------------------------------------

    def _append(self, header: session_pb2.AppendHeader, caller: Caller) -> None:
        transfer = self._await(self._transfers.append(header, caller))
        with self._closing(transfer.close):
            room: Room | None = None
            renewed = time.monotonic()
            while True:
                silent_since = time.monotonic()
                # Slots that nobody fills are not lent for longer than they are surely reserved.
                if room is not None and not self._framed.wait(renewed + RENEW_INTERVAL_S - silent_since):
                    self._await(transfer.take_back())
                    room = None
                frame = self._next_part(silent_since + SILENCE_TIMEOUT_S)
                if frame.kind is SocketFrameKind.FINISH:
                    break
                if time.monotonic() - renewed > RENEW_INTERVAL_S:
                    # Asking for room again renews the reservation, which would end in the middle of a long
                    # append.
                    room, renewed = None, time.monotonic()
                if frame.kind is SocketFrameKind.CHUNK:
                    room = self._receive(transfer, room, frame)
                # A commit takes the room back: what is committed must not be written to any more.
                elif frame.kind is SocketFrameKind.COMMIT:
                    room = None
                    self._await(transfer.commit(_parse(session_pb2.AppendCommit, frame)))
                else:
                    raise InvalidArgument(field="frame", problem=f"{frame.kind.name} is not expected here")
            answer = self._await(transfer.finish())
        self._framed.send(SocketFrameKind.APPENDED, answer.SerializeToString())

    def _next_part(self, deadline: float) -> SocketFrame:
        if not self._framed.wait(deadline - time.monotonic()):
            raise FrameError("the writer is silent")
        frame = self._framed.receive()
        if frame is None:
            raise FrameError("the connection ended before the append did")
        self._is_unfinished = frame.kind is not SocketFrameKind.FINISH
        return frame

    def _receive(self, transfer: AppendTransfer, room: Room | None, frame: SocketFrame) -> Room:
        chunk = _parse(bulk_pb2.BulkChunk, frame)
        stream = validate.stream(chunk.stream, "chunk.stream")
        # Before the data is taken: rows of a refused chunk never reach the arena.
        end = transfer.append.check(stream, chunk.token_begin, frame.data_bytes)
        parts = _parts_of(chunk, frame.data_bytes)
        places = room.places(stream, chunk.token_begin, end) if room else None
        # Lent room that does not reach so far is asked for again.
        if room is None or places is None:
            room = self._await(transfer.room(end))
            places = room.places(stream, chunk.token_begin, end)
        # Bad rows lie in the arena by then. Without a commit they are not visible, and the room goes back.
        # Received directly into the slots, and added up on the way. There is no copy between socket and
        # arena.
        if not self._framed.receive_into(places or (), parts):
            raise ChecksumMismatch(field="chunk.data")
        transfer.append.received[stream] = end
        return room

    # -- the event loop ------------------------------------------------------------------------------

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        # The thread waits for the loop, and never the loop for a thread.
        return asyncio.run_coroutine_threadsafe(at_work(work), self._loop).result()

    @contextlib.contextmanager
    def _closing(self, close: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
        try:
            yield
        finally:
            self._await(close())


Await: TypeAlias = Callable[[Coroutine[Any, Any, T]], T]
"""Has the event loop do something, and waits for it."""


def chunks(transfer: ReadTransfer, wait: Await[Any]) -> Iterator[tuple[bytes, list[memoryview]]]:
    """The frames CHUNK of a read, stream after stream: messages, and rows where they lie until the next one.

    In a thread that waits for the event loop by `wait`. Raises CorruptSegment, DeadlineExceeded, TierFailure.
    """
    # A slow reader's lease would end while its rows are being sent.
    renewed = time.monotonic()
    for stream in transfer.streams:
        for message in _messages(_parts(transfer, stream, wait)):
            yield message.encode(stream), [part.data for part in message.parts]
            if time.monotonic() - renewed > RENEW_INTERVAL_S:
                wait(transfer.renew())
                renewed = time.monotonic()


def _parts(transfer: ReadTransfer, stream: Stream, wait: Await[Any]) -> Iterator["_Part"]:
    for lent in transfer.pieces:
        row_bytes = lent.piece.segment.layout.row_bytes(stream)
        is_passing = lent.view is None
        # Looked at again after each mending.
        for _ in range(TRIES):
            # Rows in memory are read where they lie; others are read by the loop into one buffer, which
            # is used again.
            found = wait(transfer.read_past(lent, stream)) if is_passing else lent.rows(stream)
            if found is not None:
                part = _Part(lent.piece.token_begin, found.data, found.checksum, is_passing)
                parts = part.cut(row_bytes)
                if parts is not None:
                    yield from parts
                    break
            if not is_passing:
                # DRAM has other bytes than the writer's: SSD's take their place, and the rows are tried
                # again.
                wait(transfer.mend(lent))
        else:
            segment_id = lent.piece.segment.segment_id
            raise CorruptSegment(segment_id=segment_id, problem="memory does not keep its rows")


class _Message(NamedTuple):
    """Parts of one stream that travel as one frame."""

    token_begin: int
    parts: list["_Part"]

    def encode(self, stream: Stream) -> bytes:
        """The frame's message."""
        return bulk_pb2.BulkChunk(
            stream=convert.stream_name(stream),
            token_begin=self.token_begin,
            part_sizes=[len(part.data) for part in self.parts],
            checksums=[part.checksum for part in self.parts],
        ).SerializeToString()


class _Part(NamedTuple):
    """Rows as they lie, and what they must be. `is_passing`: valid until the next ones are made."""

    token_begin: int
    data: memoryview
    checksum: int
    is_passing: bool

    def cut(self, row_bytes: int) -> list["_Part"] | None:
        """The part, or what it is cut into where one frame cannot carry it; None for damaged rows."""
        if len(self.data) <= CHUNK_BYTES_LIMIT:
            return [self]
        # Several frames for one chunk: each gets a sum of its own.
        row_count, parts = max(MESSAGE_BYTES // row_bytes, 1), []
        for row in range(0, len(self.data) // row_bytes, row_count):
            data = self.data[row * row_bytes : (row + row_count) * row_bytes]
            parts.append(_Part(self.token_begin + row, data, rows_checksum(data), self.is_passing))
        # In this order: what changes between the two is found by one of them.
        return parts if rows_checksum(self.data) == self.checksum else None


def _messages(parts: Iterator[_Part]) -> Iterator[_Message]:
    """Parts put together into frames of about 1 MiB."""
    gathered: list[_Part] = []
    size_bytes = 0
    for part in parts:
        # At most so many parts of a frame: their sizes and sums travel in its head.
        if gathered and (size_bytes + len(part.data) > MESSAGE_BYTES or len(gathered) == PARTS_LIMIT):
            yield _Message(gathered[0].token_begin, gathered)
            gathered, size_bytes = [], 0
        # It lies in the buffer of the next one, so that it goes out alone.
        if part.is_passing:
            if gathered:
                yield _Message(gathered[0].token_begin, gathered)
            gathered, size_bytes = [], 0
            yield _Message(part.token_begin, [part])
            continue
        gathered.append(part)
        size_bytes += len(part.data)
    if gathered:
        yield _Message(gathered[0].token_begin, gathered)


def _parts_of(chunk: bulk_pb2.BulkChunk, data_bytes: int) -> list[Part]:
    sizes = chunk.part_sizes
    validate.within(len(sizes), 1, PARTS_LIMIT, "chunk.part_sizes")
    if len(sizes) != len(chunk.checksums):
        raise InvalidArgument(field="chunk.part_sizes", problem="every part has a checksum")
    # Together exactly the frame's bytes: what is left over would be taken for the next frame.
    if min(sizes) < 1 or sum(sizes) != data_bytes:
        raise InvalidArgument(field="chunk.part_sizes", problem=f"are not together {data_bytes} bytes")
    return [Part(*part) for part in zip(sizes, chunk.checksums, strict=True)]


def _parse(message_class: type[M], frame: SocketFrame) -> M:
    try:
        return message_class.FromString(frame.message)
    except DecodeError as error:
        raise InvalidArgument(field="request", problem="is not a message of this frame") from error
