"""Prefetching: sessions promoted ahead of need, as far as that costs nobody else what is needed sooner.

Takes what is free or clean and not needed soon, flushes nothing, and starts no read while a caller waits for
one. Worst case: it does nothing, and whoever comes waits for the promotion as if nobody had foreseen it.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Iterable

from ctxcache.cache.residency import Residency
from ctxcache.cache.sessions import Sessions
from ctxcache.cache.state import State
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import CorruptSegment

SESSIONS_AT_A_TIME = 2


class Outcome(enum.Enum):
    """How a promotion ahead of need ended."""

    DONE = enum.auto()
    NO_ROOM = enum.auto()
    NOT_WANTED = enum.auto()


class Prefetching:
    """Promotes ahead of need. Owned by the event loop."""

    def __init__(self, state: State, residency: Residency, sessions: Sessions) -> None:
        self._ledger, self._placement = state.ledger, state.ledger.placement
        self._state, self._residency, self._sessions = state, residency, sessions
        self._turns = asyncio.Semaphore(SESSIONS_AT_A_TIME)

    async def prefetch(self) -> None:
        """Promote whom the policy wants in DRAM, until there is nobody, or no room for the first of them.

        Raises the first failure at the end; who failed is left aside until its next hint or rest.
        """
        self._state.is_prefetch_wanted.clear()
        under_way: dict[asyncio.Task[Outcome], Session] = {}
        is_going_on, failure = True, None
        try:
            while True:
                while is_going_on and len(under_way) < SESSIONS_AT_A_TIME and (session := self._next()):
                    under_way[self._begin(session)] = session
                if not under_way:
                    break
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    is_going_on &= self._end(task, under_way.pop(task))
                    failure = failure or task.exception()
        finally:
            for task, session in under_way.items():
                task.cancel()
                self._placement.came(session)
            await asyncio.gather(*under_way, return_exceptions=True)
        if failure is not None:
            raise failure

    async def promote_ahead(self, session: Session, budget_bytes: int) -> int:
        """Promote the session's first missing segments, so many bytes at most; how many bytes came.

        Less where there is no room, or the session is used or goes meanwhile. Raises CorruptSegment, TierFailure.
        """
        size_bytes = session.layout.size_bytes
        missing = [segment for segment in session.shown if not segment.memory][: budget_bytes // size_bytes]
        if missing and session.is_idle:
            self._placement.coming(session)
            try:
                await self._promote(session, missing)
            finally:
                self._placement.came(session)
        return size_bytes * sum(segment.memory is not None for segment in missing)

    def _next(self) -> Session | None:
        session = self._placement.next_ahead()
        if session is not None:
            self._placement.coming(session)
        return session

    def _begin(self, session: Session) -> "asyncio.Task[Outcome]":
        missing = [segment for segment in session.shown if not segment.memory]
        return asyncio.get_running_loop().create_task(self._promote(session, missing))

    def _end(self, task: "asyncio.Task[Outcome]", session: Session) -> bool:
        """Whether whoever comes next may have more luck."""
        has_failed = task.exception() is not None
        self._placement.came(session, is_set_aside=has_failed)
        if has_failed or task.result() is Outcome.NO_ROOM:
            return False
        # Some of it may have had to leave meanwhile, for what is needed sooner.
        return task.result() is Outcome.NOT_WANTED or self._placement.is_in_memory(session)

    async def _promote(self, session: Session, segments: Iterable[Segment]) -> Outcome:
        try:
            async with self._turns:
                return await self._promote_in_turn(session, deque(segments))
        except CorruptSegment as error:
            segment = self._ledger.segment(int(error.facts["segment_id"]))
            if segment is not None:
                await self._residency.mending.quarantine({segment})
            raise

    async def _promote_in_turn(self, session: Session, segments: deque[Segment]) -> Outcome:
        while segments:
            await self._residency.promotions.wait_for_others()
            if not session.is_idle:
                return Outcome.NOT_WANTED
            has_room = await self._residency.promotions.promote_ahead(
                segments,
                may_give=lambda uid: not self._placement.is_needed_soon(uid, session.uid),
                is_wanted=lambda: session.is_idle,
            )
            if not has_room:
                return Outcome.NO_ROOM
        return Outcome.DONE
