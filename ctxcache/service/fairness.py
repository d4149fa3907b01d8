"""Fairness: one piece of bulk work per few turns of the event loop, so that small calls get in between.

gRPC takes on one call per few turns of the loop, and a call takes several, with waits for gRPC's own
threads between them. Where a piece of bulk work filled each of those waits, a small call waited
for several pieces. So bulk work waits while calls are there that have come lately and have not rested
themselves; and after each piece gRPC's threads, which may have one processor with the loop, go first.

    bulk     |piece|                     |piece|            |piece|
    calls          |come ... answered|         |none: a few turns of the loop|

Bulk work is what takes longer than a slice, and every call of a tenant that has had more than its part of the
loop lately, from before its message is read. Tenants with bulk work have their pieces in turns.

Knows nothing of the work. Worst case of bulk work: calls come without a pause, and it gets one piece per
PATIENCE_NS. Worst case of a call: one piece of bulk work, which was under way when the call came.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")
TURNS_BETWEEN = 8
"""Turns of the loop that belong to others after each piece: what gRPC needs to take on a call. One where no
rpc came lately."""
YIELDING_TURNS = 3
"""Turns, the first of these, that begin with the processor left to gRPC's threads."""
SLICE_NS = 250_000
"""How long one piece of work that never waits by itself may take."""
PART = 4
"""A tenant that has more than one in so many of the loop's nanoseconds is greedy."""
CALL_NS = 200_000
"""The processor time of a call beside its own work: gRPC's part. A byte of an answer takes one more."""
CREDIT_NS, DEBT_LIMIT_NS = 4_000_000, 20_000_000
"""How far a tenant may be ahead of its part without being greedy; how much of that is remembered."""
ALONE_NS = 10**9
"""How long after another tenant's last call a tenant counts as the only one, and is not greedy."""
TENANTS_LIMIT = 4096
"""Tenants whose use is kept in mind; with one more all begin anew."""
PATIENCE_NS = 2_000_000
"""How long bulk work waits for newcomers before its next piece."""
RPCS_NS = 10**9
"""How long after the last rpc gRPC's threads may have something to do."""
NEW_NS = 3_000_000
"""How long a call counts as a newcomer: one that waits for a disk or for others must not hold up bulk
work."""


# Newcomers, and how long they are new:
#
#     a call comes ──► newcomer ──► answered
#                         │ rests by itself, or NEW_NS are over: then it is bulk, or waits for a disk
class Newcomers:
    """Calls that came lately, and have neither ended nor rested. Owned by the event loop."""

    def __init__(self) -> None:
        self._since_ns: dict[object, int] = {}
        """When each came, the earliest first."""
        self._waiting: list[Callable[[], None]] = []
        self.called_ns = -RPCS_NS
        """When the last rpc came, whether it is a newcomer or not."""

    def come(self, now_ns: int) -> object:
        """Count this task's call among them, until it rests or `leave` is called with what this returns."""
        call = object()
        self._since_ns[call] = now_ns
        # Kept with this task: the slice that rests finds the call to which it belongs.
        _COMING.set((self, call))
        return call

    def leave(self, call: object) -> None:
        """The call is no newcomer any more. Does nothing for a call that is not a newcomer."""
        if self._since_ns.pop(call, None) is not None and not self._since_ns:
            self._tell()

    def are_there(self) -> bool:
        """Whether a call has come within NEW_NS that is still one of them."""
        oldest_ns = time.monotonic_ns() - NEW_NS
        # In order of coming, so that only the first ones are looked at.
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


# -- tenants -------------------------------------------------------------------------------------------

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of this task, for turns."""


# A mark per tenant, in the loop's time. Each use moves it PART times as far as the use took:
#
#     now ──┬────── CREDIT ──────┬───────── DEBT_LIMIT ──┐
#           │ within its part    │ greedy                │ never further: forgotten
#
# A tenant that stops catches up with time by itself: no timer, no decay.
class Usage:
    """How much of the loop each tenant has had lately. Owned by the event loop.

    A tenant's mark runs PART times as fast as what it uses, and is greedy while that is ahead of time.
    """

    def __init__(self) -> None:
        self._marks_ns: dict[str, int] = {}
        self._latest = ""
        self._mixed_ns = -ALONE_NS
        """When last a call of one tenant followed a call of another."""

    def come(self, tenant: str) -> None:
        """Count a call of this tenant as this task's."""
        TENANT.set(tenant)
        # A tenant that is alone harms nobody, however much it uses.
        if tenant != self._latest:
            if self._latest:
                self._mixed_ns = time.monotonic_ns()
            self._latest = tenant
        self.charge(tenant, CALL_NS)

    def charge(self, tenant: str, took_ns: int) -> None:
        """Note what this tenant has had."""
        now_ns = time.monotonic_ns()
        # Forgetting all is fair and rare: each begins with nothing.
        if len(self._marks_ns) >= TENANTS_LIMIT and tenant not in self._marks_ns:
            self._marks_ns.clear()
        mark_ns = max(self._marks_ns.get(tenant, 0), now_ns) + PART * took_ns
        self._marks_ns[tenant] = min(mark_ns, now_ns + DEBT_LIMIT_NS)

    def is_greedy(self, tenant: str) -> bool:
        """Whether this tenant has had more than its part, while others are there."""
        mark_ns = self._marks_ns.get(tenant, 0)
        # Most tenants have used nothing lately: no look at the clock.
        if not mark_ns:
            return False
        now_ns = time.monotonic_ns()
        return mark_ns > now_ns + CREDIT_NS and now_ns - self._mixed_ns < ALONE_NS

    # The steps of a coroutine as asyncio takes them: time between them is others', and is not charged.
    @coroutine
    def metered(self, tenant: str, work: Awaitable[T]) -> Generator[Any, Any, T]:
        """Await the same work; what it takes of the loop, between its own waits, counts as this tenant's."""
        steps = work.__await__()
        step: Callable[[Any], Any] = steps.send
        argument: Any = None
        while True:
            begun_ns = time.monotonic_ns()
            try:
                waited_for = step(argument)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # typed Any by the library
            # In `finally`: the step that ends or fails took time as well.
            finally:
                self.charge(tenant, time.monotonic_ns() - begun_ns)
            try:
                argument, step = (yield waited_for), steps.send
            # A cancellation is thrown into the work, as asyncio would.
            except BaseException as error:  # noqa: BLE001  # the work's own to handle, a cancellation too
                argument, step = error, steps.throw


# -- turns ---------------------------------------------------------------------------------------------


class Turns:
    """Turns: of each tenant in the order of arrival, and tenant after tenant. Owned by the event loop."""

    def __init__(self, newcomers: Newcomers | None = None) -> None:
        """`newcomers`: calls that go first; None where pieces wait for nobody but each other."""
        self.newcomers = newcomers
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the next one first."""
        self._is_taken = False
        self._patience: asyncio.TimerHandle | None = None
        """Set while newcomers go first."""

    async def take(self) -> None:
        """Wait for a turn, which lasts up to the next await.

        The turn before it is a few turns of the loop ago.
        """
        # No turn is under way: it begins now, unless newcomers are there.
        if not self._is_taken:
            self._is_taken = True
            if not self._must_wait():
                self._begin_rest()
                return
            self._let_newcomers_first()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # By tenant and not by caller: a tenant with a hundred streams has one line.
        self.waiting.setdefault(TENANT.get(), deque()).append(turn)
        await turn

    def _begin_rest(self) -> None:
        # A frame of a local client is dealt with in the turn in which it comes, so one is enough for those.
        self._rest(TURNS_BETWEEN if self._are_rpcs_there() else 0)

    def _rest(self, count: int) -> None:
        # gRPC's threads wake up when a request comes, and may have one processor with the loop.
        if count % YIELDING_TURNS == 0 and self._are_rpcs_there():
            # A thread that wakes does not interrupt one that computes: the kernel may let it wait for
            # milliseconds. Without rpcs the processor would go to strangers, for as long.
            os.sched_yield()
        asyncio.get_running_loop().call_soon(*((self._rest, count - 1) if count else (self._next,)))

    def _next(self) -> None:
        # Newcomers have PATIENCE_NS, or until they are gone.
        if self.waiting and self._must_wait():
            self._let_newcomers_first()
        else:
            self._give()

    def _are_rpcs_there(self) -> bool:
        """Whether one came lately; nobody says so where there are no newcomers to ask."""
        return self.newcomers is None or time.monotonic_ns() - self.newcomers.called_ns < RPCS_NS

    def _must_wait(self) -> bool:
        return self.newcomers is not None and self.newcomers.are_there()

    def _let_newcomers_first(self) -> None:
        assert self.newcomers is not None  # noqa: S101  # it has just been asked
        self._patience = asyncio.get_running_loop().call_later(PATIENCE_NS / 1e9, self._go_on)
        self.newcomers.call_when_gone(self._go_on)

    def _go_on(self) -> None:
        """The newcomers are gone, or have had their time: whichever is first."""
        # Called by the timer and by the newcomers: the second call finds nothing to do.
        if self._patience is not None and self.newcomers is not None:
            self._patience.cancel()
            self._patience = None
            self.newcomers.forget(self._go_on)
            self._give()

    def _give(self) -> None:
        while self.waiting:
            # Round robin: a tenant that has had a turn goes behind the others.
            tenant = next(iter(self.waiting))
            own = self.waiting.pop(tenant)
            turn = own.popleft()
            if own:
                self.waiting[tenant] = own
            # A caller that was cancelled has left its future behind.
            if not turn.done():
                turn.set_result(None)
                self._begin_rest()
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
        # Resting ends the state of a newcomer: what rests is bulk.
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
