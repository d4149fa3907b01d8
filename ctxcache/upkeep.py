"""Upkeep: what happens without being asked. Expiry, deadlines, write-behind, free room, access times.

One loop, one step after the other; a step that fails is logged and tried again at the next turn.
Worst case between turns is the longest step: a flush of everything that is dirty.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ctxcache.cache import Cache
from ctxcache.core.session import Session
from ctxcache.errors import CacheError

log = logging.getLogger(__name__)

INTERVAL_S = 0.5
FREE_RATIO = 1 / 16
"""Share of the arena kept free, so that a promotion or a writer seldom waits for room."""


class Upkeep:
    """The background loop. Owned by the server's task group."""

    def __init__(self, cache: Cache, *, interval_s: float = INTERVAL_S) -> None:
        self._cache = cache
        self._interval_s = interval_s

    async def run(self) -> None:
        """Turn for ever; ends by cancellation."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.turn()

    async def turn(self) -> None:
        """Do everything once."""
        self._cache.writing.expire_due()
        self._cache.reading.expire_due()
        for step in (self._cache.sessions.expire_due, self._write_behind, self._keep_free):
            await _try(step)
        await _try(self._cache.sessions.save_access_times)

    async def _write_behind(self) -> None:
        for session in list(self._cache.state.by_uid.values()):
            if _has_full_dirty_segment(session) and not session.is_gone:
                await self._cache.residency.flush(session)

    async def _keep_free(self) -> None:
        dram = self._cache.residency.dram
        self._cache.residency.keep_free(int(dram.capacity_bytes * FREE_RATIO))


def _has_full_dirty_segment(session: Session) -> bool:
    """Growing tails wait: they would be written again and again."""
    return any(s.is_dirty and (s.row_count == s.layout.segment_tokens or not s.is_open) for s in session.segments)


async def _try(step: Callable[[], Awaitable[None]]) -> None:
    try:
        await step()
    except CacheError as error:
        log.warning("upkeep_step_failed step=%s reason=%s error=%s", step.__name__, error.reason, error)
