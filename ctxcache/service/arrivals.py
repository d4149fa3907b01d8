"""Arrivals: request messages before they are whole, from callers that may never finish them. Owned by the event loop.

gRPC takes no byte of a message past a stream's first window until the message is asked for. Here is asked, for a
bounded number at a time. Worst case: a crowd of callers that never finish, each of which is cut off when others wait.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from ctxcache.errors import DeadlineExceeded, TooManyRequests
from ctxcache.service.rpc import Context

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
    """The raw messages of one rpc, in their order.

    A read that was begun is never cancelled: gRPC writes to it until the rpc is over.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._coming: asyncio.Future[Any] | None = None
        self._returned: list[bytes] = []
        self._is_over = False

    def __aiter__(self) -> "Incoming":
        return self

    async def __anext__(self) -> bytes:
        message = await self.next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def next(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None when the caller has said all. Raises TimeoutError; the next call goes on then."""
        if self._returned:
            return self._returned.pop()
        if self._is_over:
            return None
        if self._coming is None:
            self._coming = asyncio.ensure_future(self._context.read())
            self._coming.add_done_callback(_retrieve)
        if not (await asyncio.wait((self._coming,), timeout=timeout_s))[0]:
            raise TimeoutError
        coming, self._coming = self._coming, None
        message = coming.result()
        if message is grpc.aio.EOF:
            self._is_over = True
            return None
        assert isinstance(message, bytes)  # noqa: S101  # nothing decodes it before
        return message

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
        while left_bytes > 0 and (left_s := end_s - loop.time()) > 0:
            try:
                message = await self.next(min(SILENCE_S, left_s))
            except TimeoutError:
                return
            if message is None:
                return
            left_bytes -= len(message)


def _retrieve(read: "asyncio.Future[Any]") -> None:
    # Of a read that nobody waits for any more: the rpc is over.
    if not read.cancelled():
        read.exception()


class Arrivals:
    """How many messages arrive at a time, and which ones give way."""

    def __init__(self, limit: int = ARRIVALS_LIMIT) -> None:
        self._limit = limit
        self._arriving: dict[asyncio.Timeout, float] = {}
        """Since when, the oldest first; those that were told to give way are not in it any more."""
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._waiting_of: Counter[str] = Counter()
        self._promised_count = 0
        """Turns that were given and not taken up yet."""
        self._look: asyncio.TimerHandle | None = None
        self._discarding_count = 0
        self.cut_off_count = 0
        """How many were refused because they did not become whole."""

    async def receive(self, incoming: Incoming, peer: str) -> bytes | None:
        """A caller's next message, whole; None when it has said all. Raises DeadlineExceeded, TooManyRequests."""
        if self._free_count <= 0 or self._waiting:
            await self._wait(peer.rpartition(":")[0])
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            async with asyncio.timeout(ARRIVAL_TIMEOUT_S) as limit:
                self._arriving[limit] = begun_s
                if self._waiting and self._look is None:
                    self._make_way()
                try:
                    return await incoming.next()
                finally:
                    self._arriving.pop(limit, None)
                    self._admit()
        except TimeoutError:
            self.cut_off_count += 1
            took_s = f"{loop.time() - begun_s:.2g}"
            raise DeadlineExceeded(target="the rest of the request", timeout_s=took_s) from None

    async def receive_all(self, incoming: Incoming, peer: str) -> AsyncGenerator[bytes]:
        """Every message; one that does not come in time is the last one. Raises TooManyRequests."""
        with contextlib.suppress(DeadlineExceeded):
            while (message := await self.receive(incoming, peer)) is not None:
                yield message

    async def discard(self, incoming: Incoming) -> None:
        """As `Incoming.discard`, for as many at a time as may arrive: of more, nothing is read on."""
        if self._discarding_count < self._limit:
            self._discarding_count += 1
            try:
                await incoming.discard()
            finally:
                self._discarding_count -= 1

    async def _wait(self, host: str) -> None:
        """Until it is this caller's turn to send. No host has more than half of the places."""
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

    @property
    def _free_count(self) -> int:
        return self._limit - len(self._arriving) - self._promised_count

    def _admit(self) -> None:
        while self._waiting and self._free_count > 0:
            _, turn = self._waiting.popleft()
            # One that was cancelled takes no turn.
            if not turn.done():
                self._promised_count += 1
                turn.set_result(None)

    def _make_way(self) -> None:
        """Cut off those that have had their time, while others wait."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        loop = asyncio.get_running_loop()
        while self._waiting and self._arriving:
            oldest, since_s = next(iter(self._arriving.items()))
            if since_s + PATIENCE_S > loop.time():
                self._look = loop.call_at(since_s + PATIENCE_S, self._make_way)
                return
            del self._arriving[oldest]
            if not oldest.expired():
                oldest.reschedule(loop.time())
