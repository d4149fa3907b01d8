"""Turns: one piece of bulk work per few turns of the event loop, so that small calls get in between.

gRPC takes on one call of each method per few turns of the loop, and a call takes several: where
every stream moved a message of 1 MiB in each of them, calls waited for seconds. Knows nothing of
the work. Worst case of whoever waits: one piece of each of the others.
"""

import asyncio
import time
from collections import deque
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
TURNS_BETWEEN = 4
"""Turns of the loop that belong to others after each piece: what gRPC needs to take on a call."""
SLICE_NS = 1_000_000
"""How long one piece of work that never waits by itself may take."""


class Turns:
    """Whose turn it is, in the order of coming. Owned by the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False

    async def take(self) -> None:
        """Wait until nobody else has had a turn for a few turns of the loop; what follows, up to the next await, is in it."""
        if not self._is_taken:
            self._is_taken = True
            self._rest(TURNS_BETWEEN)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _rest(self, count: int) -> None:
        asyncio.get_running_loop().call_soon(*((self._rest, count - 1) if count else (self._next,)))

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._rest(TURNS_BETWEEN)
                return
        self._is_taken = False


class Slice:
    """The time that one caller's work may take of the loop before it has to rest. Begins when it is made."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._end_ns = time.monotonic_ns() + SLICE_NS

    @property
    def is_over(self) -> bool:
        """Whether it is time to rest."""
        return time.monotonic_ns() >= self._end_ns

    async def rest(self) -> None:
        """Leave the loop to others, and begin anew when it is this caller's turn again."""
        # A caller may have been begun without a task of its own; what waits needs one.
        await asyncio.sleep(0)
        await self._turns.take()
        self._end_ns = time.monotonic_ns() + SLICE_NS

    async def work(self, steps: Generator[None, None, T]) -> T:
        """Take all steps of a piece of work, and rest between two of them where it is time to; what it returns."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # typed Any by the library
            if self.is_over:
                await self.rest()
