"""Requests before they are whole: how many arrive at a time, and which of them give way."""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from ctxcache.errors import DeadlineExceeded, TooManyRequests
from ctxcache.service.callers import Context

# How a message arrives:
#
#     _arriving < limit ──► arrives ──► whole
#                             │ PATIENCE_S over, and others wait ──► cut off: DEADLINE_EXCEEDED
#     else ──► _waiting, in order of coming ──► promised ──► arrives
#                │ 1,024 wait, or 512 of one host ──► refused
SMALL_BYTES = 256 << 10
"""Largest request of an rpc that takes one message."""
ARRIVALS_LIMIT = 16
"""Messages that arrive at a time."""
WAITING_LIMIT = 1024
"""Messages that wait to arrive; nothing of them past the first window was taken."""
PATIENCE_S = 0.25
"""How long a message may arrive while others wait to."""
ARRIVAL_TIMEOUT_S = 10.0
"""How long a message may arrive."""
DISCARD_BYTES = 64 << 20
"""How much of a refused request is read on."""
DISCARD_TIMEOUT_S = 5.0
"""How long it is read on at most."""
SILENCE_S = 0.2
"""A refused caller that sends nothing for so long waits for its answer."""


class Incoming:
    """The raw messages of one rpc, in their order, from a caller that may never finish them.

    A read that was begun is never cancelled: gRPC writes to it until the rpc is over.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._read: asyncio.Task[Any] | None = None
        """The read of the next message, which outlives whoever waits for it."""
        self._patience: asyncio.Timeout | None = None
        """Over the wait for that read."""
        self._returned: list[bytes] = []
        self._is_over = False

    def __aiter__(self) -> "Incoming":
        return self

    async def __anext__(self) -> bytes:
        message = await self.next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def next(self) -> bytes | None:
        """The next message; None when the caller has said all.

        Raises TimeoutError where it has to give way; the next call goes on then, as after a cancellation.
        """
        if self._returned:
            return self._returned.pop()
        if self._is_over:
            return None
        if self._read is None:
            self._read = asyncio.create_task(self._context.read())
            # A read whose rpc has ended meanwhile fails, and nobody waits for it any more.
            self._read.add_done_callback(lambda read: read.cancelled() or read.exception())
        try:
            # `wait` leaves the read alone when this task is cancelled or has to give way.
            async with asyncio.timeout(None) as self._patience:
                await asyncio.wait([self._read])
        except TimeoutError:
            # The message may have come in the same turn of the loop.
            if not self._read.done():
                raise
        finally:
            self._patience = None
        read, self._read = self._read, None
        message = read.result()
        if message is grpc.aio.EOF:
            self._is_over = True
            return None
        assert isinstance(message, bytes)  # noqa: S101  # nothing decodes it before
        return message

    def give_way(self) -> None:
        """End the wait for the next message, if it has not come."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def give_back(self, message: bytes | None) -> None:
        """Let it be the next one again."""
        if message is not None:
            self._returned.append(message)

    async def discard(self) -> None:
        """Read on until the caller has said all, or falls silent; bounded in bytes and in time.

        A client that is answered while it sends may lose the answer: gRPC tells some clients of the
        failure to send first (grpc.aio: INTERNAL without a reason).
        """
        loop, left_bytes = asyncio.get_running_loop(), DISCARD_BYTES
        end_s = loop.time() + DISCARD_TIMEOUT_S
        # Bounded both ways: by bytes for those who send much, by time for those who send little.
        while left_bytes > 0 and (left_s := end_s - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(SILENCE_S, left_s)):
                    message = await self.next()
            except TimeoutError:
                return
            if message is None:
                return
            left_bytes -= len(message)


class Arrivals:
    """How many messages arrive at a time, and which ones give way. Owned by the event loop.

    gRPC takes no byte of a message past a stream's first window until the message is asked for. This class
    asks for a bounded number of messages at a time. Worst case: a crowd of callers that never finish. Each
    is cut off when others wait.
    """

    def __init__(self, limit: int = ARRIVALS_LIMIT) -> None:
        self._limit = limit
        self._arriving: dict[Incoming, float] = {}
        """Since when, the oldest first; those that were told to give way are not in it any more."""
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._waiting_of: Counter[str] = Counter()
        self._promised_count = 0
        """Turns that were given and not taken up yet."""
        self._look: asyncio.TimerHandle | None = None
        """One timer for all that arrive, set while there are any."""
        self._discarding_count = 0
        self.cut_off_count = 0
        """How many were refused because they did not become whole."""

    async def receive(self, incoming: Incoming, peer: Callable[[], str]) -> bytes | None:
        """A caller's next message, whole; None when it has said all. `peer` is asked where it has to wait.

        Raises DeadlineExceeded, TooManyRequests.
        """
        # Those that wait go first, also if a place is free at this moment.
        if self._waiting or len(self._arriving) + self._promised_count >= self._limit:
            await self._wait(peer().rpartition(":")[0])
        loop = asyncio.get_running_loop()
        self._arriving[incoming] = begun_s = loop.time()
        if self._look is None:
            patience_s = PATIENCE_S if self._waiting else ARRIVAL_TIMEOUT_S
            self._look = loop.call_at(begun_s + patience_s, self._make_way)
        try:
            return await incoming.next()
        except TimeoutError:
            self.cut_off_count += 1
            took_s = f"{loop.time() - begun_s:.2g}"
            raise DeadlineExceeded(target="the rest of the request", timeout_s=took_s) from None
        finally:
            self._arriving.pop(incoming, None)
            if self._waiting:
                self._admit()

    async def receive_all(self, incoming: Incoming, peer: Callable[[], str]) -> AsyncGenerator[bytes]:
        """Every message; one that does not come in time is the last one. Raises TooManyRequests."""
        with contextlib.suppress(DeadlineExceeded):
            while (message := await self.receive(incoming, peer)) is not None:
                yield message

    async def discard(self, incoming: Incoming) -> None:
        """As `Incoming.discard`, for as many at a time as may arrive: of more, nothing is read on."""
        # Nothing is read on of more than that: they may lose their answer, and cost nothing.
        if self._discarding_count < self._limit:
            self._discarding_count += 1
            try:
                await incoming.discard()
            finally:
                self._discarding_count -= 1

    async def _wait(self, host: str) -> None:
        """Until it is this caller's turn to send. No host has more than half of the places."""
        # By host: one machine with a thousand connections must not keep others from waiting.
        is_too_much = self._waiting_of[host] >= WAITING_LIMIT // 2
        if is_too_much or len(self._waiting) >= WAITING_LIMIT:
            self.cut_off_count += 1
            raise TooManyRequests(what="requests that are not whole", limit=self._limit)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = host, turn
        self._waiting.append(place)
        self._waiting_of[host] += 1
        self._make_way()
        try:
            await turn
            # Taken up by what follows, without a wait in between.
            self._promised_count -= 1
        except asyncio.CancelledError:
            # Cancelled while it waited, or after its turn had been given: then the turn goes on to the next.
            if turn.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
            else:
                self._promised_count -= 1
                self._admit()
            raise
        finally:
            self._waiting_of[host] -= 1
            if not self._waiting_of[host]:
                del self._waiting_of[host]

    def _admit(self) -> None:
        while self._waiting and len(self._arriving) + self._promised_count < self._limit:
            _, turn = self._waiting.popleft()
            # One that was cancelled takes no turn.
            if not turn.done():
                self._promised_count += 1
                turn.set_result(None)

    def _make_way(self) -> None:
        """Cut off those that have had their time, which is short while others wait; look again in time."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        loop = asyncio.get_running_loop()
        patience_s = PATIENCE_S if self._waiting else ARRIVAL_TIMEOUT_S
        while self._arriving:
            oldest, since_s = next(iter(self._arriving.items()))
            if since_s + patience_s > loop.time():
                self._look = loop.call_at(since_s + patience_s, self._make_way)
                return
            # Told once: what is out of the table is not told again.
            del self._arriving[oldest]
            oldest.give_way()
