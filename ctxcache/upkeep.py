"""Upkeep: what happens without being asked. Expiry, deadlines, write-behind, free room, access times.

Two loops, so that a slow device delays no deadline: one ends what is over, one moves bytes. A step
that fails is logged and tried again at the next turn. Worst case between two turns of the second is
a flush of everything that is dirty; of the first, one commit.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from ctxcache.cache import Cache
from ctxcache.core.session import Session
from ctxcache.errors import CacheError, SessionNotFound

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
FREE_RATIO = 1 / 16
"""Share of the arena kept free, so that a promotion or a writer seldom waits for room."""


class Upkeep:
    """The background loops. Owned by the server."""

    def __init__(self, cache: Cache, *, interval_s: float = INTERVAL_S) -> None:
        self._cache = cache
        self._interval_s = interval_s

    async def run(self) -> None:
        """Turn for ever; ends by cancellation."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._repeat(self.end_what_is_over))
            loops.create_task(self._repeat(self.move))

    async def turn(self) -> None:
        """Do everything once."""
        await self.end_what_is_over()
        await self.move()

    async def end_what_is_over(self) -> None:
        """End leases, reservations and sessions whose time has come; write down accesses."""
        for step in (
            self._deadlines,
            self._cache.sessions.expire_due,
            self._cache.sessions.save_access_times,
        ):
            await _try(step)

    async def move(self) -> None:
        """Write full segments behind their writers' backs, and keep some of the arena free."""
        for session in [self._cache.state.by_uid[uid] for uid in self._cache.state.resident]:
            if _has_full_dirty_segment(session) and not session.is_gone:
                await _try(self._cache.residency.flush, session)
        await _try(self._keep_free)

    async def _repeat(self, turn: Callable[[], Awaitable[None]]) -> NoReturn:
        while True:
            await asyncio.sleep(self._interval_s)
            await turn()

    async def _deadlines(self) -> None:
        self._cache.writing.expire_due()
        self._cache.reading.expire_due()

    async def _keep_free(self) -> None:
        dram = self._cache.residency.dram
        self._cache.residency.keep_free(int(dram.capacity_bytes * FREE_RATIO))


def _has_full_dirty_segment(session: Session) -> bool:
    """Growing tails wait: they would be written again and again."""
    return any(
        s.is_dirty and (s.row_count == s.layout.segment_tokens or not s.is_open) for s in session.segments
    )


async def _try(step: Callable[..., Awaitable[None]], *arguments: Session) -> None:
    try:
        await step(*arguments)
    except SessionNotFound:
        # It was deleted meanwhile, or evicted to make room.
        return
    except CacheError as error:
        log.warning("upkeep_step_failed step=%s reason=%s error=%s", step.__name__, error.reason, error)
    except Exception:  # the supervisor: upkeep that ended for good would be noticed by nobody
        log.exception("upkeep_step_broken step=%s", step.__name__)
