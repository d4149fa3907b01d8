"""Fairness: one piece of bulk work per few turns of the event loop, so that small calls get in between.

gRPC takes on one call of each method per few turns of the loop, and a call takes several, with waits for
gRPC's own thread between them. Where a piece of bulk work filled each of those waits, a small call waited for
several pieces. So bulk work waits while calls are there that have come lately and have not rested themselves.

    bulk     |piece|                     |piece|            |piece|
    calls          |come ... answered|         |none: a few turns of the loop|

Knows nothing of the work. Worst case of bulk work: calls come without a pause, and it gets one piece per
PATIENCE_NS. Worst case of a call: one piece of bulk work, which was under way when the call came.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
TURNS_BETWEEN = 4
"""Turns of the loop that belong to others after each piece: what gRPC needs to take on a call."""
SLICE_NS = 500_000
"""How long one piece of work that never waits by itself may take."""
PATIENCE_NS = 2_000_000
"""How long bulk work waits for newcomers before its next piece."""
NEW_NS = 3_000_000
"""How long a call counts as a newcomer: one that waits for a disk or for others must not hold up bulk
work."""


class Newcomers:
    """Calls that came lately, and have neither ended nor rested. Owned by the event loop."""

    def __init__(self) -> None:
        self._since_ns: dict[object, int] = {}
        """When each came, the earliest first."""
        self._waiting: list[Callable[[], None]] = []

    def come(self, now_ns: int) -> object:
        """Count this task's call among them, until it rests or `leave` is called with what this returns."""
        call = object()
        self._since_ns[call] = now_ns
        _COMING.set((self, call))
        return call

    def leave(self, call: object) -> None:
        """The call is no newcomer any more. Does nothing for a call that is not a newcomer."""
        if self._since_ns.pop(call, None) is not None and not self._since_ns:
            self._tell()

    def are_there(self) -> bool:
        """Whether a call has come within NEW_NS that is still one of them."""
        oldest_ns = time.monotonic_ns() - NEW_NS
        while self._since_ns:
            call, since_ns = next(iter(self._since_ns.items()))
            if since_ns >= oldest_ns:
                return True
            del self._since_ns[call]
        return False

    def call_when_gone(self, callback: Callable[[], None]) -> None:
        """Call back once, when the last of them has left."""
        self._waiting.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Undo `call_when_gone`."""
        if callback in self._waiting:
            self._waiting.remove(callback)

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            asyncio.get_running_loop().call_soon(callback)


_COMING: ContextVar[tuple[Newcomers, object] | None] = ContextVar("coming", default=None)
"""The call that this task carries out, while it may be a newcomer."""


class Turns:
    """Turns, in the order of arrival. Owned by the event loop."""

    def __init__(self, newcomers: Newcomers | None = None) -> None:
        """`newcomers`: calls that go first; None where pieces wait for nobody but each other."""
        self._newcomers = newcomers
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        self._patience: asyncio.TimerHandle | None = None
        """Set while newcomers go first."""

    async def take(self) -> None:
        """Wait for a turn, which lasts up to the next await.

        The turn before it is a few turns of the loop ago.
        """
        if not self._is_taken:
            self._is_taken = True
            if not self._must_wait():
                self._rest(TURNS_BETWEEN)
                return
            self._let_newcomers_first()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _rest(self, count: int) -> None:
        asyncio.get_running_loop().call_soon(*((self._rest, count - 1) if count else (self._next,)))

    def _next(self) -> None:
        if self._waiting and self._must_wait():
            self._let_newcomers_first()
        else:
            self._give()

    def _must_wait(self) -> bool:
        return self._newcomers is not None and self._newcomers.are_there()

    def _let_newcomers_first(self) -> None:
        assert self._newcomers is not None  # noqa: S101  # it has just been asked
        self._patience = asyncio.get_running_loop().call_later(PATIENCE_NS / 1e9, self._go_on)
        self._newcomers.call_when_gone(self._go_on)

    def _go_on(self) -> None:
        """The newcomers are gone, or have had their time: whichever is first."""
        if self._patience is not None and self._newcomers is not None:
            self._patience.cancel()
            self._patience = None
            self._newcomers.forget(self._go_on)
            self._give()

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._rest(TURNS_BETWEEN)
                return
        self._is_taken = False


class LoopSlice:
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
        if coming := _COMING.get():
            newcomers, call = coming
            newcomers.leave(call)
        await asyncio.sleep(0)
        await self._turns.take()
        self._end_ns = time.monotonic_ns() + SLICE_NS

    async def work(self, steps: Generator[None, None, T]) -> T:
        """Take all steps of a piece of work, resting between two of them when it is time; its result."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # typed Any by the library
            if self.is_over:
                await self.rest()
