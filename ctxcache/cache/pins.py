"""Pins: a budget that callers may wait for, one after the other, for a short while.

Callers of one tenant are served in the order of coming, so that small requests never keep a large one from
its room; what needs no more room than it has does not wait. Tenants do not wait for each other's callers: the
budget leaves room for each of them. Worst case: `room_wait_ns`, and then a refusal that says when to come again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from weakref import WeakValueDictionary

from ctxcache.core.budget import Budget, Client
from ctxcache.core.limits import Bound
from ctxcache.core.placement.shares import EVERYONE
from ctxcache.errors import CapacityExceeded, TooManyRequests

QUEUE_LENGTH = 256
"""Callers that wait at a time, of whom no tenant's are all; more are refused at once."""


class Pins:
    """Who keeps what in the arena, for one purpose. Owned by the event loop."""

    def __init__(self, what: str, budget: Budget, *, wait_ns: int) -> None:
        self._what = what
        self._wait_s = wait_ns / 10**9
        self.budget = budget
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Of each tenant that has callers who wait; of all together where the budget is not divided."""
        self._freed = asyncio.Event()
        self._waiting: Counter[str] = Counter()

    @property
    def waiting_count(self) -> int:
        """Callers that wait for room."""
        return self._waiting.total()

    async def wait_for_room(self, client: Client, needed: Callable[[], Mapping[int, int]]) -> None:
        """Wait until what `needed` says may be pinned; pin it before the next await.

        `needed` is asked again each time: what it looks at may change meanwhile. Raises
        CapacityExceeded (more than may ever be pinned), TooManyRequests, and what `needed` raises.
        """
        if self.has_room(client, needed()):
            return
        account = self._account(client)
        bound = Bound(QUEUE_LENGTH, self.budget.is_divided)
        if bound.is_reached(self._waiting.total(), self._waiting[account]):
            raise self._refusal(client)
        self._waiting[account] += 1
        turn = self._turns.setdefault(account, asyncio.Lock())
        try:
            async with asyncio.timeout(self._wait_s), turn:
                while not self._fits(client, needed()):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise self._refusal(client) from None
        finally:
            self._waiting[account] -= 1
            if not self._waiting[account]:
                del self._waiting[account]

    def has_room(self, client: Client, sizes_bytes: Mapping[int, int]) -> bool:
        """Whether so much may be pinned now, with nobody of the tenant waiting.

        Raises CapacityExceeded: more than may ever be pinned.
        """
        return self._fits(client, sizes_bytes) and self._account(client) not in self._waiting

    def pin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Count as pinned what there is room for."""
        self.budget.pin(client, sizes_bytes)

    def unpin(self, client: Client, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin`, and let the next one look."""
        self.budget.unpin(client, sizes_bytes)
        self._freed.set()

    def _account(self, client: Client) -> str:
        return client.tenant if self.budget.is_divided else EVERYONE

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
