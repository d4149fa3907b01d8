"""An arrival: rows of another host's guest come to a session of ours, over the other store's bulk channel.

    a thread of the fleet's                      the event loop, which owns the cache
    receives, verifies, puts in place      ──►   AppendTransfer: reserve, lend room, commit

What arrives is an append: rows are listed, found by their keys and made durable exactly as those of an
engine. Every part is verified as it comes, by the sum that its writer made where it is a whole chunk. Rows
are committed a stretch at a time. Worst case: the other host stops in the middle; what was committed is a
shorter session.
"""

import asyncio
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from ctxcache.cache import Cache
from ctxcache.client.credentials import ClientTls
from ctxcache.errors import CacheError, ChecksumMismatch
from ctxcache.identity import ArenaGrant
from ctxcache.service import validate
from ctxcache.service.admission import Admission
from ctxcache.service.bulk_connection import AppendTransfer
from ctxcache.service.callers import Caller
from ctxcache.v1 import bulk_pb2, session_pb2
from ctxcache.wire.framed_socket import VERSION, FramedSocket, FrameError, Part, SocketFrame, SocketFrameKind
from ctxcache.wire.status import from_encoded_status

log = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 2.0
STALL_TIMEOUT_S = 2.0
"""How long the other host may send nothing: its user waits."""
STRETCH_BYTES = 16 << 20
"""About how many bytes are committed at a time."""
STRETCHES_IN_ROOM = 8
"""So many fit at least into what writers may hold at a time."""
STRETCH_TOKENS = 64
ASKED_AHEAD = 1
COMING_LIMIT = 1 << 20
PACE_S, PACE_BYTES = 5.0, 1 << 20
"""So much has to come in that time, or the rest of it: whoever drips is waited for no longer."""
HEARD_INTERVAL_S = 1.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Offer:
    """What another host offers: a guest, and a ticket for its bulk channel at `host`."""

    host: str
    answer: Any
    """A YieldSessionResponse."""
    again: Callable[[], Awaitable["Offer"]]
    """Asks once more, for another ticket. Raises Busy, Left, NoAnswer."""


class Stretch(NamedTuple):
    """Tokens `[begin, end)` of the guest, which are asked for and committed together."""

    begin: int
    end: int
    is_behind_gap: bool


class Arrival:
    """One session that comes."""

    def __init__(
        self, cache: Cache, calls: Admission, offer: Offer, session_id: str, tls: ClientTls | None
    ) -> None:
        """`session_id`: of the empty session that was made for it, of the guest's layout."""
        self._cache, self._calls, self._offer, self._tls = cache, calls, offer, tls
        self._guest: session_pb2.Session = offer.answer.session
        self._session_id, self._tenant = session_id, self._guest.tenant
        self._loop = asyncio.get_running_loop()
        self.token_count = 0
        """Tokens that have come."""
        self.size_bytes = 0
        self.was_let_in = False
        """Whether the other store took the ticket: it has room for one more connection."""
        self._framed: FramedSocket | None = None
        self._is_over = False
        """Whether nobody waits for it any more."""
        self._is_ours, self._done_count = False, 0
        """Whether this store's own work is waited for, and not the other one; how much of it was done."""

    async def begin(self) -> AppendTransfer:
        """Open the append. Raises what AppendSession raises for its header."""
        transfer = AppendTransfer(self._cache)
        header = session_pb2.AppendHeader(
            name=f"sessions/{self._session_id}",
            model_fingerprint=self._guest.model_fingerprint,
            write_offset=0,
            contents=self._guest.contents,
            coming_token_count=min(self._guest.token_count, COMING_LIMIT),
        )
        caller = Caller("fleet", ArenaGrant(self._tenant))
        await transfer.open(header, caller, self._calls)
        return transfer

    def run(self, transfer: AppendTransfer) -> None:
        """Bring what there is, in this thread. Raises CacheError, FrameError, OSError."""
        self._framed = framed = self._connect()
        try:
            self._check_wanted()
            self._greet(framed)
            # Each stretch is asked for before the one ahead of it has come: nobody waits for the other.
            asked = deque[Stretch]()
            for stretch in self._stretches(transfer):
                self._ask(framed, stretch)
                asked.append(stretch)
                if len(asked) > ASKED_AHEAD:
                    self._read(framed, transfer, asked.popleft())
            for stretch in asked:
                self._read(framed, transfer, stretch)
        finally:
            framed.close()

    # Positions behind a gap were computed with what was dropped there. One token of zeros stands for it until
    # all has come, and is dropped then, so that no other session finds these rows by their keys.
    def _stretches(self, transfer: AppendTransfer) -> Iterator[Stretch]:
        """All that is to come, in order."""
        layout = transfer.append.layout
        token_bytes = sum(layout.row_bytes(spec.stream) for spec in layout.specs)
        # Its room is held as a whole: a small store brings less at a time, and others write meanwhile.
        pins, client = self._cache.appends.pins, transfer.append.reservation.client
        stretch_bytes = min(STRETCH_BYTES, pins.limit_of(client) // STRETCHES_IN_ROOM)
        step = max(stretch_bytes // token_bytes // STRETCH_TOKENS, 1) * STRETCH_TOKENS
        whole, count = self._guest.whole_token_count, self._guest.token_count
        for begin in range(0, whole, step):
            yield Stretch(begin, min(begin + step, whole), is_behind_gap=False)
        for begin in range(whole, count, step):
            yield Stretch(begin, min(begin + step, count), is_behind_gap=True)

    async def _leave_gap(self, transfer: AppendTransfer) -> None:
        append = transfer.append
        await transfer.take_back()
        await append.make_room(append.reservation.committed + 1)
        for stream, at in append.received.items():
            zeros = memoryview(bytes(append.layout.row_bytes(stream)))
            self._cache.appends.place(append.reservation, stream, at, zeros)
            append.received[stream] = at + 1

    @property
    def has_gap(self) -> bool:
        """Whether a token of zeros stands behind the first `whole_token_count`."""
        return self._guest.whole_token_count < self._guest.token_count

    async def close_gap(self) -> None:
        """Drop the token that stands for what was dropped before. Raises what TruncateSession raises."""
        at = self._guest.whole_token_count
        if self.has_gap and self.token_count > at:
            await self._cache.sessions.drop(self._tenant, self._session_id, None, ((at, at + 1),))

    # -- the connection ------------------------------------------------------------------------------

    def _connect(self) -> FramedSocket:
        ticket = self._offer.answer.ticket
        if not ticket.ticket or not ticket.tcp_port:
            raise FrameError("the other store has no bulk channel")
        connected = socket.create_connection((self._offer.host, ticket.tcp_port), CONNECT_TIMEOUT_S)
        if self._tls is not None:
            try:
                # Read anew for each: a process outlives its certificates.
                name = self._tls.server_name or self._offer.host
                connected = self._tls.context().wrap_socket(connected, server_hostname=name)
            except (OSError, CacheError):
                connected.close()
                raise
        framed = FramedSocket(connected)
        # Its own time-outs are for bulk work that nobody waits for.
        if self._tls is not None:
            connected.settimeout(STALL_TIMEOUT_S)
        else:
            stall = struct.pack("ll", int(STALL_TIMEOUT_S), 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        return framed

    def _greet(self, framed: FramedSocket) -> None:
        hello = bulk_pb2.BulkHello(ticket=self._offer.answer.ticket.ticket, version=VERSION)
        framed.send(SocketFrameKind.HELLO, hello.SerializeToString())
        self._receive(framed, SocketFrameKind.WELCOME)
        self.was_let_in = True

    def _ask(self, framed: FramedSocket, stretch: Stretch) -> None:
        request = session_pb2.ReadSessionRequest(
            name=self._guest.name,
            model_fingerprint=self._guest.model_fingerprint,
            if_generation_match=self._guest.generation,
            range=session_pb2.TokenRange(begin=stretch.begin, end=stretch.end),
            is_quiet=True,
        )
        framed.send(SocketFrameKind.READ, request.SerializeToString())

    def _read(self, framed: FramedSocket, transfer: AppendTransfer, stretch: Stretch) -> None:
        if stretch.is_behind_gap and stretch.begin == self._guest.whole_token_count:
            self._await(self._leave_gap(transfer))
        # Behind a gap our positions are one ahead of the other store's indexes.
        ahead, end = int(stretch.is_behind_gap), stretch.end + stretch.is_behind_gap
        self._receive(framed, SocketFrameKind.READ_HEADER)
        room = None
        while (
            frame := self._receive(framed, SocketFrameKind.CHUNK, SocketFrameKind.END)
        ).kind is not SocketFrameKind.END:
            chunk = bulk_pb2.BulkChunk.FromString(frame.message)
            stream = validate.stream(chunk.stream, "chunk.stream")
            first = chunk.token_begin + ahead
            last = transfer.append.check(stream, first, frame.data_bytes)
            if room is None:
                # Room for the whole stretch at once: every stream fills it.
                room = self._await(transfer.room(end))
            places = room.places(stream, first, last)
            if places is None:
                raise FrameError("the other store sends tokens that were not asked for")
            parts = list(map(Part, chunk.part_sizes, chunk.checksums))
            if sum(part.size_bytes for part in parts) != frame.data_bytes:
                raise FrameError("the parts of a chunk are not its data")
            if not framed.receive_into(places, parts):
                raise ChecksumMismatch(field=f"{stream} at token {first}")
            transfer.append.received[stream] = last
            self.size_bytes += frame.data_bytes
        self._await(transfer.commit(session_pb2.AppendCommit(token_count=end)))
        self.token_count = end

    def _receive(self, framed: FramedSocket, *kinds: SocketFrameKind) -> SocketFrame:
        if not framed.wait(STALL_TIMEOUT_S):
            raise FrameError("the other store sends nothing")
        frame = framed.receive()
        if frame is None:
            raise FrameError("the other store ended the connection")
        if frame.kind is SocketFrameKind.ERROR:
            raise from_encoded_status(frame.message, self._offer.host)
        if frame.kind not in kinds:
            raise FrameError(f"{frame.kind.name} is not expected here")
        return frame

    # A loop that has ended answers nothing any more: a thread that waited for it would keep the process.
    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_over:
            work.close()
        self._check_wanted()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._is_ours = True
        try:
            while not wait([future], HEARD_INTERVAL_S).done:
                self._check_wanted()
            return future.result()
        finally:
            future.cancel()
            self._is_ours, self._done_count = False, self._done_count + 1

    def _check_wanted(self) -> None:
        if self._is_over:
            raise FrameError("nobody waits for it any more")

    # -- its pace ------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """End it when too little comes."""
        is_at_pace = True
        while is_at_pace:
            came_bytes, done_count = self.size_bytes, self._done_count
            await asyncio.sleep(PACE_S)
            is_at_work = self._is_ours or self._done_count > done_count
            is_at_pace = is_at_work or self.size_bytes - came_bytes >= PACE_BYTES
        self.end()

    def end(self) -> None:
        """Nobody waits for it any more: its thread stops soon."""
        self._is_over = True
        if self._framed is not None:
            self._framed.shut()


BROKEN = (CacheError, FrameError, DecodeError, OSError, ValueError, ArithmeticError, LookupError)
"""What comes of another store that breaks off, or answers with anything at all."""


async def bring(
    arrival: Arrival,
    run: Callable[[Callable[[AppendTransfer], None], AppendTransfer], "asyncio.Future[None]"],
) -> None:
    """Bring a session, as far as it comes; what is lacking is logged. `run` has a thread do its work.

    Raises what AppendSession raises for its header.
    """
    begun = time.monotonic()
    transfer = await arrival.begin()
    watch = asyncio.get_running_loop().create_task(arrival.watch())
    try:
        await run(arrival.run, transfer)
    except BROKEN as error:
        log.warning("arrival_cut_short tokens=%d error=%s", arrival.token_count, error)
    finally:
        watch.cancel()
        arrival.end()
        await transfer.close()
    await arrival.close_gap()
    log.info(
        "session_arrived tokens=%d bytes=%d seconds=%.3f",
        arrival.token_count,
        arrival.size_bytes,
        time.monotonic() - begun,
    )
