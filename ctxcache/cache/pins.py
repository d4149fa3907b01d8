"""Pins: a budget that callers may wait for, one after the other, for a short while.

Whoever waits is served in the order of coming, so that small requests never keep a large one from
its room; what needs no more room than it has does not wait. Worst case: `room_wait_ns`, and then a
refusal that says when to come again.
"""

import asyncio
from collections.abc import Callable, Mapping

from ctxcache.core.budget import Budget, Client
from ctxcache.errors import CapacityExceeded, TooManyRequests

QUEUE_LENGTH = 256
"""Callers that wait at a time; more are refused at once."""


class Pins:
    """Who keeps what in the arena, for one purpose. Owned by the event loop."""

    def __init__(self, what: str, budget: Budget, *, wait_ns: int) -> None:
        self._what = what
        self._wait_s = wait_ns / 10**9
        self.budget = budget
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._waiting = 0

    @property
    def waiting_count(self) -> int:
        """Callers that wait for room."""
        return self._waiting

    async def wait_for_room(self, client: Client, needed: Callable[[], Mapping[int, int]]) -> None:
        """Wait until what `needed` says may be pinned; pin it before the next await.

        `needed` is asked again each time: what it looks at may change meanwhile. Raises
        CapacityExceeded (more than may ever be pinned), TooManyRequests, and what `needed` raises.
        """
        if self._fits(client, needed()) and not self._waiting:
            return
        if self._waiting >= QUEUE_LENGTH:
            raise self._refusal(client)
        self._waiting += 1
        try:
            # A caller may have been begun without a task of its own; what waits needs one.
            await asyncio.sleep(0)
            async with asyncio.timeout(self._wait_s), self._turn:
                while not self._fits(client, needed()):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise self._refusal(client) from None
        finally:
            self._waiting -= 1

    def pin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Count as pinned what there is room for."""
        self.budget.pin(client, sizes_bytes)

    def unpin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin`, and let the next one look."""
        self.budget.unpin(client, sizes_bytes)
        self._freed.set()

    def _fits(self, client: Client, sizes_bytes: Mapping[int, int]) -> bool:
        if self.budget.has_room(client, sizes_bytes):
            return True
        needed_bytes, limit_bytes = sum(sizes_bytes.values()), self.budget.limit_of(client)
        if needed_bytes > limit_bytes:
            free_bytes = limit_bytes - self.budget.used_by(client)
            raise CapacityExceeded(
                f"DRAM: {needed_bytes} B needed, {self._what} may hold {limit_bytes} B",
                tier="DRAM", needed_bytes=needed_bytes, free_bytes=free_bytes, limit_bytes=limit_bytes,
            )  # fmt: skip
        return False

    def _refusal(self, client: Client) -> TooManyRequests:
        return TooManyRequests(what=f"bytes of {self._what}", limit=self.budget.limit_of(client))
