"""Write-behind: what is written though nobody asked for it, and in which order.

Looks at what was committed since it last looked, at what has become old and, above the watermark,
at what is oldest; never at what is clean. What is not worth its place on SSD is spared. Worst case: a session is written whole, however large it
is, and a device that refuses is tried a few times per turn.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from ctxcache.cache.residency import Residency
from ctxcache.cache.state import State
from ctxcache.core.session import Session
from ctxcache.core.watermarks import Allowance

PARALLEL_FLUSHES = 8
"""Sessions written at a time: they share syncs."""
FAILURES_PER_TURN = 16
"""Failures after which the rest waits for the next turn."""
LOOKS_PER_SLICE = 256
"""Sessions looked at before others get their turn of the event loop."""


@dataclass(frozen=True, slots=True, eq=False)
class Due:
    """A session to be written now; `is_tail_left`: without what still grows."""

    session: Session
    is_tail_left: bool
    size_bytes: int


Attempt = Callable[[Callable[[Due], Awaitable[None]], Due], Awaitable[bool]]
"""Does a step with something and says whether it went well; raises nothing."""


class WriteBehind:
    """Writes what is due. Owned by the event loop."""

    def __init__(self, state: State, residency: Residency) -> None:
        self._state = state
        self._residency = residency
        bytes_per_s = residency.watermarks.write_behind_bytes_per_s
        self._allowance = Allowance(bytes_per_s, state.clock.monotonic_ns())
        self._under_way_bytes = 0
        self.looked_at_count = 0
        """Sessions looked at since the start."""

    async def turn(self, attempt: Attempt) -> bool:
        """Write all that is due, as far as the allowance goes; returns whether all went well."""
        self._residency.is_pressed.clear()
        self._allowance.bytes_per_s = self._residency.watermarks.write_behind_bytes_per_s
        taken: list[Due] = []
        failure_count = 0
        due = self._due()
        try:
            while failure_count < FAILURES_PER_TURN and (batch := await _some(due)):
                taken += batch
                results = await asyncio.gather(*(attempt(self.write, item) for item in batch))
                failure_count += results.count(False)
        finally:
            await due.aclose()
            # At the end only: what fails is not tried again in the same turn.
            for item in taken:
                self._state.unwritten.put_back(item.session)
        return not failure_count

    async def write(self, due: Due) -> None:
        """Flush a session. Raises CapacityExceeded, TierFailure, SessionNotFound."""
        try:
            await self._residency.flush(due.session, is_tail_left=due.is_tail_left)
        finally:
            self._under_way_bytes -= due.size_bytes

    async def _due(self) -> AsyncGenerator[Due]:
        begun_ns = self._state.clock.monotonic_ns()
        unwritten, by_uid = self._state.unwritten, self._state.by_uid
        for uid in list(unwritten.changed):
            await self._look()
            if not self._allowance.is_left(begun_ns):
                return
            # What is still in use is looked at again, until it rests or has become old.
            if uid in unwritten.changed and not self._residency.admission.waits(by_uid[uid]):
                del unwritten.changed[uid]
                if unwritten.has_full(by_uid[uid]) and not self._spares(by_uid[uid]):
                    yield self._take(by_uid[uid], is_tail_left=True)
        while self._allowance.is_left(begun_ns) and (found := self._oldest(begun_ns)):
            if not self._spares(by_uid[found]):
                yield self._take(by_uid[found], is_tail_left=False)
            await self._look()

    async def _look(self) -> None:
        self.looked_at_count += 1
        if self.looked_at_count % LOOKS_PER_SLICE == 0:
            await asyncio.sleep(0)

    def _oldest(self, now_ns: int) -> bytes | None:
        """The session whose rows are too old; above the watermark the one whose rows are oldest."""
        unwritten, age_ns = self._state.unwritten, self._residency.watermarks.tail_age_ns
        found = None
        if age_ns:
            found = unwritten.take_oldest(now_ns - age_ns) or unwritten.take_spared(now_ns - age_ns)
        dirty_bytes = unwritten.due_bytes - self._under_way_bytes
        if found is None and self._residency.excess_dirty_bytes(dirty_bytes) > 0:
            found = unwritten.take_oldest(now_ns)
        return found

    def _spares(self, session: Session) -> bool:
        return self._residency.spares(session, self._under_way_bytes)

    def _take(self, session: Session, *, is_tail_left: bool) -> Due:
        self._state.unwritten.taken(session.uid)
        segments = self._state.unwritten.segments(session.uid)
        tail = session.growing_tail if is_tail_left else None
        size_bytes = sum(s.layout.size_bytes for s in segments if s is not tail)
        self._under_way_bytes += size_bytes
        self._allowance.spend(size_bytes)
        return Due(session, is_tail_left, size_bytes)


async def _some(due: AsyncGenerator[Due]) -> list[Due]:
    """The next few."""
    batch: list[Due] = []
    async for item in due:
        batch.append(item)
        if len(batch) == PARALLEL_FLUSHES:
            break
    return batch
