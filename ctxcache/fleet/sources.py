"""Where the rows of an arrival come from: the bulk channel of another store, or objects of the bucket.

Both are frames of reads, and are verified part by part. A source is used by one thread, but for `shut`.
Worst case: it stops in the middle; what came before is whole.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from typing_extensions import Buffer
from xxhash import xxh3_64

from ctxcache.cache.models import Registered
from ctxcache.client.credentials import ClientTls
from ctxcache.errors import CacheError
from ctxcache.service import convert
from ctxcache.service.fairness import LoopSlice
from ctxcache.v1 import bulk_pb2, model_pb2, peer_pb2, session_pb2
from ctxcache.wire.frame_buffer import FrameReader
from ctxcache.wire.framed_socket import VERSION, FramedSocket, FrameError, Part, SocketFrame, SocketFrameKind
from ctxcache.wire.status import from_encoded_status

CONNECT_TIMEOUT_S = 2.0
STALL_TIMEOUT_S = 2.0
"""How long another host may send nothing: its user waits."""
OBJECT_TIMEOUT_S = 10.0
"""How long an object may take, which comes whole."""
OBJECTS_AHEAD = 3
STRETCH_TOKENS = 64


class Stretch(NamedTuple):
    """Tokens `[begin, end)` of a session elsewhere, which are asked for and committed together."""

    begin: int
    end: int
    is_behind_gap: bool


class Source(Protocol):
    """The frames of a session's rows."""

    told: session_pb2.Session
    """The session as it is there."""
    was_let_in: bool
    """Whether its frames can be had."""
    ahead: int
    """How many stretches are asked for before the first one has come."""

    def open(self) -> None:
        """Get ready. Raises FrameError, OSError, CacheError."""

    def stretches(self, step: int) -> Iterator[Stretch]:
        """All that is to come, in order, of `step` tokens or less where the source can choose."""

    def ask(self, stretch: Stretch) -> None:
        """Have a stretch come. Raises FrameError."""

    def receive(self, *kinds: SocketFrameKind) -> SocketFrame:
        """The next frame, of one of these kinds, up to its data. Raises FrameError, CacheError."""

    def receive_into(
        self, places: Iterable[tuple[memoryview, xxh3_64 | None]], parts: Iterable[Part]
    ) -> bool:
        """See FramedSocket."""

    def check_whole(self) -> None:
        """Raise FrameError where a stretch that has come is not the one that was meant."""

    def shut(self) -> None:
        """Whoever waits for it stops waiting. From any thread."""

    def close(self) -> None:
        """Give it up."""


class Spare(NamedTuple):
    """An object that was read and verified."""

    part: peer_pb2.SharedPart
    body: Buffer


@dataclass(frozen=True, slots=True)
class Offer:
    """A session elsewhere, and by what its rows can be had."""

    told: session_pb2.Session
    model: Any
    """A Model."""
    remaining: Any
    """A Duration: how long it would live on without an access."""
    parts: tuple[peer_pb2.SharedPart, ...]
    """Objects of the bucket that hold rows of the session."""
    source: Callable[[], Source]
    again: Callable[[], Awaitable["Offer"]] | None = None
    """Asks once more, where the other store has no room for a connection. Raises Busy, Left, NoAnswer."""
    tcp_port: int = 0
    """Of the other store's bulk channel; 0 for what the bucket has."""


class PeerSource:
    """The bulk channel of a store that has a guest."""

    ahead = 1

    def __init__(
        self,
        host: str,
        told: session_pb2.Session,
        ticket: bulk_pb2.BulkTicket,
        tls: ClientTls | None,
        *,
        begin: int = 0,
    ) -> None:
        """`begin`: the first token that is to come, of a session from which nothing was dropped."""
        self._host, self._ticket, self._tls, self._begin = host, ticket, tls, begin
        self.told = told
        self.was_let_in = False
        self._framed: FramedSocket | None = None

    def open(self) -> None:
        """See Source."""
        if not self._ticket.ticket or not self._ticket.tcp_port:
            raise FrameError("the other store has no bulk channel")
        connected = socket.create_connection((self._host, self._ticket.tcp_port), CONNECT_TIMEOUT_S)
        if self._tls is not None:
            try:
                # Read anew for each: a process outlives its certificates.
                name = self._tls.server_name or self._host
                connected = self._tls.context().wrap_socket(connected, server_hostname=name)
            except (OSError, CacheError):
                connected.close()
                raise
        self._framed = FramedSocket(connected)
        # Its own time-outs are for bulk work that nobody waits for.
        if self._tls is not None:
            connected.settimeout(STALL_TIMEOUT_S)
        else:
            stall = struct.pack("ll", int(STALL_TIMEOUT_S), 0)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        hello = bulk_pb2.BulkHello(ticket=self._ticket.ticket, version=VERSION)
        self._framed.send(SocketFrameKind.HELLO, hello.SerializeToString())
        self.receive(SocketFrameKind.WELCOME)
        self.was_let_in = True

    # Positions behind a gap were computed with what was dropped there.
    def stretches(self, step: int) -> Iterator[Stretch]:
        """See Source."""
        whole, count = self.told.whole_token_count, self.told.token_count
        for begin in range(self._begin, whole, step):
            yield Stretch(begin, min(begin + step, whole), is_behind_gap=False)
        for begin in range(whole, count, step):
            yield Stretch(begin, min(begin + step, count), is_behind_gap=True)

    def ask(self, stretch: Stretch) -> None:
        """See Source."""
        request = session_pb2.ReadSessionRequest(
            name=self.told.name,
            model_fingerprint=self.told.model_fingerprint,
            if_generation_match=self.told.generation,
            range=session_pb2.TokenRange(begin=stretch.begin, end=stretch.end),
            is_quiet=True,
        )
        self._open.send(SocketFrameKind.READ, request.SerializeToString())

    def receive(self, *kinds: SocketFrameKind) -> SocketFrame:
        """See Source."""
        if not self._open.wait(STALL_TIMEOUT_S):
            raise FrameError("the other store sends nothing")
        return _expected(self._open.receive(), kinds, self._host)

    def receive_into(
        self, places: Iterable[tuple[memoryview, xxh3_64 | None]], parts: Iterable[Part]
    ) -> bool:
        """See Source."""
        return self._open.receive_into(places, parts)

    def check_whole(self) -> None:
        """See Source: the other store sends what it was asked for, or an error."""

    def shut(self) -> None:
        """See Source."""
        if self._framed is not None:
            self._framed.shut()

    def close(self) -> None:
        """See Source."""
        if self._framed is not None:
            self._framed.close()

    @property
    def _open(self) -> FramedSocket:
        if self._framed is None:
            raise FrameError("it is not open")
        return self._framed


class StoredSource:
    """Objects of the bucket."""

    ahead = OBJECTS_AHEAD
    was_let_in = True

    def __init__(
        self,
        told: session_pb2.Session,
        parts: Iterable[peer_pb2.SharedPart],
        get: Callable[[peer_pb2.SharedPart], Awaitable[Buffer]],
        hasher: Callable[[str], blake2b],
        *,
        begin: int = 0,
    ) -> None:
        """`get` raises NoAnswer, also where an object is gone. `hasher` takes an object's name.

        `begin`: the first token that is to come, of a session from which nothing was dropped.
        """
        self._begin = begin
        self.told, self._parts, self._get, self._hasher = told, tuple(parts), get, hasher
        self._loop = asyncio.get_running_loop()
        self._coming = deque[tuple[peer_pb2.SharedPart, Future[Buffer]]]()
        self._reader: tuple[peer_pb2.SharedPart, FrameReader] | None = None

    def open(self) -> None:
        """See Source."""

    def stretches(self, step: int) -> Iterator[Stretch]:  # noqa: ARG002  objects are as long as they are
        """See Source."""
        at = self._begin
        for part in self._parts:
            if part.token_end <= at:
                continue
            # No object has the next token: what lies behind it cannot be appended.
            if part.token_begin > at:
                return
            at = part.token_end
            is_behind_gap = part.token_begin >= self.told.whole_token_count
            yield Stretch(part.token_begin, part.token_end, is_behind_gap)

    def ask(self, stretch: Stretch) -> None:
        """See Source."""
        part = next(part for part in self._parts if part.token_begin == stretch.begin)
        coming = asyncio.run_coroutine_threadsafe(self._body(part), self._loop)
        self._coming.append((part, coming))

    async def _body(self, part: peer_pb2.SharedPart) -> Buffer:
        return await self._get(part)

    def receive(self, *kinds: SocketFrameKind) -> SocketFrame:
        """See Source."""
        if SocketFrameKind.READ_HEADER in kinds:
            part, coming = self._coming.popleft()
            if not wait_for([coming], OBJECT_TIMEOUT_S).done:
                coming.cancel()
                raise FrameError(f"object {part.name} does not come")
            self._reader = part, FrameReader(coming.result(), self._hasher(part.name))
        return _expected(self._read.receive(), kinds, "the bucket")

    def receive_into(
        self, places: Iterable[tuple[memoryview, xxh3_64 | None]], parts: Iterable[Part]
    ) -> bool:
        """See Source."""
        return self._read.receive_into(places, parts)

    def check_whole(self) -> None:
        """See Source."""
        if self._reader is not None and self._reader[0].digest != self._reader[1].digest:
            raise FrameError(f"object {self._reader[0].name} is not what was put")

    def shut(self) -> None:
        """See Source."""
        for _, coming in list(self._coming):
            coming.cancel()

    def close(self) -> None:
        """See Source."""
        self.shut()
        self._coming.clear()

    @property
    def _read(self) -> FrameReader:
        if self._reader is None:
            raise FrameError("nothing was asked for")
        return self._reader[1]


def is_whole(part: peer_pb2.SharedPart, body: Buffer, hasher: blake2b) -> bool:
    """Whether an object is what was put. Raises FrameError, DecodeError."""
    reader, is_right = FrameReader(body, hasher), True
    while (frame := reader.receive()) is not None:
        if frame.kind is SocketFrameKind.CHUNK:
            chunk = bulk_pb2.BulkChunk.FromString(frame.message)
            sums = list(map(Part, chunk.part_sizes, chunk.checksums))
            if sum(one.size_bytes for one in sums) != frame.data_bytes:
                raise FrameError("the parts of a chunk are not its data")
            is_right &= reader.receive_into([(memoryview(bytearray(frame.data_bytes)), None)], sums)
    return is_right and reader.digest == part.digest


async def told_model(record: Registered, pace: LoopSlice) -> model_pb2.Model:
    """A model as another host is told of it, its probe as well."""
    encoded = await pace.work(convert.encoded_model(record))
    if record.probe is not None:
        encoded += convert.encoded_probe(record.probe)
    return model_pb2.Model.FromString(encoded)


def _expected(frame: SocketFrame | None, kinds: tuple[SocketFrameKind, ...], whose: str) -> SocketFrame:
    if frame is None:
        raise FrameError(f"{whose} has sent its last frame")
    if frame.kind is SocketFrameKind.ERROR:
        raise from_encoded_status(frame.message, whose)
    if frame.kind not in kinds:
        raise FrameError(f"{frame.kind.name} is not expected here")
    return frame
