"""An arrival: rows of a session elsewhere come to a session of ours, from another host or from the bucket.

    a thread of the fleet's                      the event loop, which owns the cache
    receives, verifies, puts in place      ──►   AppendTransfer: reserve, lend room, commit

What arrives is an append: rows are listed, found by their keys and made durable exactly as those of an
engine. Every part is verified as it comes, by the sum that its writer made where it is a whole chunk. Rows
are committed a stretch at a time. Worst case: the source stops in the middle; what was committed is a
shorter session.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from ctxcache.cache import Cache
from ctxcache.core.fleet.register import NoAnswer
from ctxcache.core.ledger.session import GUESTS
from ctxcache.core.ledger.work import at_work
from ctxcache.errors import CacheError, ChecksumMismatch
from ctxcache.fleet.sources import STRETCH_TOKENS, Source, Stretch
from ctxcache.identity import ArenaGrant
from ctxcache.service import validate
from ctxcache.service.admission import Admission
from ctxcache.service.bulk_connection import AppendTransfer
from ctxcache.service.callers import Caller
from ctxcache.v1 import bulk_pb2, session_pb2
from ctxcache.wire.framed_socket import FrameError, Part, SocketFrameKind

log = logging.getLogger(__name__)
STRETCH_BYTES = 16 << 20
"""About how many bytes are committed at a time."""
STRETCHES_IN_ROOM = 8
"""So many fit at least into what writers may hold at a time."""
COMING_LIMIT = 1 << 20
PACE_S, PACE_BYTES = 5.0, 1 << 20
"""So much has to come in that time, or the rest of it: whoever drips is waited for no longer."""
HEARD_INTERVAL_S = 1.0
T = TypeVar("T")


class Arrival:
    """One session that comes."""

    def __init__(
        self, cache: Cache, calls: Admission, source: Source, session_id: str, *, begin: int = 0
    ) -> None:
        """`session_id`: of the session that was made for it, of the layout that the source tells.

        `begin`: tokens that it has already; the source's stretches begin there.
        """
        self._cache, self._calls, self._source = cache, calls, source
        self._told = source.told
        self._session_id, self._tenant = session_id, self._told.tenant
        self._loop = asyncio.get_running_loop()
        self._begin = begin
        self.token_count = begin
        """Tokens that are there, with those that have come."""
        self.size_bytes = 0
        self.stretches_s: list[float] = []
        """How long each stretch took."""
        self._is_over = False
        """Whether nobody waits for it any more."""
        self._is_ours, self._done_count = False, 0
        """Whether this store's own work is waited for, and not the other one; how much of it was done."""

    async def begin(self) -> AppendTransfer:
        """Open the append. Raises what AppendSession raises for its header."""
        transfer = AppendTransfer(self._cache, is_guest=self._session_id.startswith(GUESTS))
        header = session_pb2.AppendHeader(
            name=f"sessions/{self._session_id}",
            model_fingerprint=self._told.model_fingerprint,
            write_offset=self._begin,
            contents=self._told.contents,
            coming_token_count=min(self._told.token_count - self._begin, COMING_LIMIT),
        )
        caller = Caller("fleet", ArenaGrant(self._tenant))
        await transfer.open(header, caller, self._calls)
        return transfer

    def run(self, transfer: AppendTransfer) -> None:
        """Bring what there is, in this thread. Raises CacheError, FrameError, OSError, NoAnswer."""
        source = self._source
        try:
            source.open()
            self._check_wanted()
            # Each stretch is asked for before the one ahead of it has come: nobody waits for the other.
            asked = deque[Stretch]()
            for stretch in source.stretches(self._step(transfer)):
                source.ask(stretch)
                asked.append(stretch)
                if len(asked) > source.ahead:
                    self._read(transfer, asked.popleft())
            for stretch in asked:
                self._read(transfer, stretch)
        finally:
            source.close()

    def _step(self, transfer: AppendTransfer) -> int:
        """Tokens of a stretch."""
        layout = transfer.append.layout
        token_bytes = sum(layout.row_bytes(spec.stream) for spec in layout.specs)
        # Its room is held as a whole: a small store brings less at a time, and others write meanwhile.
        pins, client = self._cache.appends.pins, transfer.append.reservation.client
        stretch_bytes = min(STRETCH_BYTES, pins.limit_of(client) // STRETCHES_IN_ROOM)
        return max(stretch_bytes // token_bytes // STRETCH_TOKENS, 1) * STRETCH_TOKENS

    # Positions behind a gap were computed with what was dropped there. One token of zeros stands for it until
    # all has come, and is dropped then, so that no other session finds these rows by their keys.
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
        return self._told.whole_token_count < self._told.token_count

    async def close_gap(self) -> None:
        """Drop the token that stands for what was dropped before. Raises what TruncateSession raises."""
        at = self._told.whole_token_count
        if self.has_gap and self.token_count > at:
            await self._cache.sessions.drop(self._tenant, self._session_id, None, ((at, at + 1),))

    # -- its rows ------------------------------------------------------------------------------------

    def _read(self, transfer: AppendTransfer, stretch: Stretch) -> None:
        if stretch.is_behind_gap and stretch.begin == self._told.whole_token_count:
            self._await(self._leave_gap(transfer))
        begun, source = time.monotonic(), self._source
        header = source.receive(SocketFrameKind.READ_HEADER)
        # An object counts its tokens as they were when it was put. Behind a gap our positions are one ahead.
        told = session_pb2.ReadHeader.FromString(header.message)
        end = stretch.end + stretch.is_behind_gap
        ahead = stretch.begin - told.range.begin + stretch.is_behind_gap
        room = None
        while (
            frame := source.receive(SocketFrameKind.CHUNK, SocketFrameKind.END)
        ).kind is not SocketFrameKind.END:
            chunk = bulk_pb2.BulkChunk.FromString(frame.message)
            stream = validate.stream(chunk.stream, "chunk.stream")
            first = chunk.token_begin + ahead
            # An object may begin with tokens that another store has brought.
            known_bytes = 0
            if stretch.begin < self._begin:
                row_bytes = transfer.append.layout.row_bytes(stream)
                known_bytes = min(max(self._begin - first, 0) * row_bytes, frame.data_bytes)
                first += known_bytes // row_bytes
            places: list[tuple[memoryview, Any]] = [(memoryview(bytearray(known_bytes)), None)]
            if known_bytes < frame.data_bytes:
                last = transfer.append.check(stream, first, frame.data_bytes - known_bytes)
                if room is None:
                    # Room for the whole stretch at once: every stream fills it.
                    room = self._await(transfer.room(end))
                new_places = room.places(stream, first, last)
                if new_places is None:
                    raise FrameError("tokens came that were not asked for")
                places = [*places[: bool(known_bytes)], *new_places]
            parts = list(map(Part, chunk.part_sizes, chunk.checksums))
            if sum(part.size_bytes for part in parts) != frame.data_bytes:
                raise FrameError("the parts of a chunk are not its data")
            if not source.receive_into(places, parts):
                raise ChecksumMismatch(field=f"{stream} at token {first}")
            if known_bytes < frame.data_bytes:
                transfer.append.received[stream] = last
            self.size_bytes += frame.data_bytes
        source.check_whole()
        self._await(transfer.commit(session_pb2.AppendCommit(token_count=end)))
        self.token_count = end
        self.stretches_s.append(time.monotonic() - begun)

    # A loop that has ended answers nothing any more: a thread that waited for it would keep the process.
    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_over:
            work.close()
        self._check_wanted()
        future = asyncio.run_coroutine_threadsafe(at_work(work), self._loop)
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
        self._source.shut()


BROKEN = (
    *(CacheError, FrameError, DecodeError, NoAnswer, CancelledError),
    *(OSError, ValueError, ArithmeticError, LookupError),
)
"""Errors of a source that breaks off, or that answers with anything at all."""


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
