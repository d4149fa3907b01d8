"""What a connection of the bulk channel has done for it on the event loop, which owns the cache.

Everything here is a coroutine that the connection's thread waits for; between two of them the thread
touches only what was lent to it. Worst case: a connection that breaks ends what it held, here.
"""

from contextlib import AsyncExitStack, ExitStack

from ctxcache.cache import Cache
from ctxcache.cache.appends import Room
from ctxcache.cache.leases import Bounce, Lease, Lent, Summed
from ctxcache.format.streams import Stream
from ctxcache.service import convert
from ctxcache.service.admission import Admission
from ctxcache.service.appending import Append, begin_append
from ctxcache.service.caller import Caller
from ctxcache.service.identification import Identification, Properties
from ctxcache.service.streams import read_header, read_request
from ctxcache.service.tickets import Tickets
from ctxcache.v1 import session_pb2


class ReadTransfer:
    """A read under way: its lease, and pieces lent until `close`."""

    def __init__(self, cache: Cache) -> None:
        self._reading, self._clock = cache.leases, cache.state.clock
        self._held = AsyncExitStack()
        self._bounce = Bounce()
        self._lease: Lease
        self.header: session_pb2.ReadHeader
        self.streams: tuple[Stream, ...]
        self.pieces: tuple[Lent, ...]

    async def open(self, request: session_pb2.ReadSessionRequest, caller: Caller, calls: Admission) -> None:
        """Hold what is asked for. Raises what ReadSession raises."""
        async with AsyncExitStack() as held:
            caller.check()
            held.enter_context(calls.enter(caller.tenant))
            asked, streams = read_request(request, caller.tenant)
            lease, chosen, _ = await held.enter_async_context(self._reading.stream(asked, streams))
            self._lease, self.streams = lease, tuple(chosen)
            self.pieces = held.enter_context(self._reading.lend(lease))
            self.header = read_header(lease, streams, self._clock)
            self._held = held.pop_all()

    async def read_past(self, lent: Lent, stream: Stream) -> Summed:
        """Rows of a piece that is not in DRAM, valid until the next call. Raises as `Leases.read_past`."""
        return await self._reading.read_past(self._lease, lent.piece, stream, self._bounce)

    async def mend(self, lent: Lent) -> None:
        """DRAM has other rows of a piece than it should. Raises CorruptSegment, TierFailure."""
        await self._reading.mend(lent.piece.segment)

    async def renew(self) -> None:
        """Let it live on. Raises DeadlineExceeded."""
        self._reading.renew(self._lease)

    async def close(self) -> None:
        """Let go of everything."""
        await self._held.aclose()


class AppendTransfer:
    """An append under way: its reservation, and the room lent of it until the next commit."""

    def __init__(self, cache: Cache) -> None:
        self._writing, self._clock = cache.appends, cache.state.clock
        self._held = ExitStack()
        self._lent = ExitStack()
        self.append: Append

    async def open(self, header: session_pb2.AppendHeader, caller: Caller, calls: Admission) -> None:
        """Begin. Raises what AppendSession raises for its header."""
        with ExitStack() as held:
            caller.check()
            held.enter_context(calls.enter(caller.tenant))
            self.append = await begin_append(self._writing, header, caller.tenant)
            held.callback(self.append.release)
            self._held = held.pop_all()

    async def room(self, token_end: int) -> Room:
        """Room up to that token at least; what was lent before is not any more. Raises as `Append.make_room`."""
        await self.take_back()
        await self.append.make_room(token_end)
        return self._lent.enter_context(self._writing.lend(self.append.reservation))

    async def take_back(self) -> None:
        """What was lent is not any more."""
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
        await self.close()
        self.append.check_finished()
        return session_pb2.AppendSessionResponse(
            session=convert.session_message(self.append.view, self._clock)
        )


class Transfers:
    """Begins transfers. Owned by the event loop."""

    def __init__(
        self, cache: Cache, calls: Admission, connections: Admission, tickets: Tickets,
        identification: Identification,
    ) -> None:  # fmt: skip
        self._cache, self._calls, self._connections, self._tickets = cache, calls, connections, tickets
        self._identification = identification

    async def let_in(self, ticket: bytes, properties: Properties, entered: ExitStack) -> Caller:
        """Whose ticket it is; it is used up, and the connection counts as its tenant's until `entered` is closed.

        `properties`: what the connection proves. Raises Unauthenticated, TooManyRequests.
        """
        caller = self._tickets.use(ticket)
        self._identification.check_certificate(caller, properties)
        entered.enter_context(self._connections.enter(caller.tenant))
        return caller

    async def leave(self, entered: ExitStack) -> None:
        """The connection is over."""
        entered.close()

    async def read(self, request: session_pb2.ReadSessionRequest, caller: Caller) -> ReadTransfer:
        """Begin a read. Raises what ReadSession raises."""
        transfer = ReadTransfer(self._cache)
        await transfer.open(request, caller, self._calls)
        return transfer

    async def append(self, header: session_pb2.AppendHeader, caller: Caller) -> AppendTransfer:
        """Begin an append. Raises what AppendSession raises for its header."""
        transfer = AppendTransfer(self._cache)
        await transfer.open(header, caller, self._calls)
        return transfer
