"""Budgets: how many bytes may be pinned, and which request gets the next free bytes. Nothing waits here.

A segment that several clients pin counts once in all, and once for each client: a hundred readers of one
prefix pin no more than one does. A segment belongs to one tenant. Cost: two dictionary entries per segment
and client.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.core.limits import Bound
from ctxcache.core.placement.shares import Shares
from ctxcache.errors import TooManyRequests

OWN_PER_FREE = 1
"""A tenant may pin at most so many times what it leaves free: its readers and writers together leave some."""


class Pinner(NamedTuple):
    """A client that pins. `number` None: the server itself, which no client's share binds."""

    tenant: str
    number: int | None = None


class Budget:
    """Pinned segments by id, with their sizes. Owned by the event loop."""

    def __init__(self, *, limit_bytes: int, client_limit_bytes: int, is_divided: bool = False) -> None:
        """`is_divided`: no tenant may pin so much that nothing is left for others."""
        self.limit_bytes = limit_bytes
        self.is_divided = is_divided
        self._tenant_bytes: Counter[str] = Counter()
        self.client_limit_bytes = min(client_limit_bytes, limit_bytes)
        self.used_bytes = 0
        self._pins: Counter[int] = Counter()
        self._client_pins: Counter[tuple[Pinner, int]] = Counter()
        self._client_bytes: Counter[Pinner] = Counter()

    def limit_of(self, client: Pinner) -> int:
        """The most bytes that the client could ever pin."""
        # Alone it may have so much that what is left free is in proportion.
        limit_bytes = self.limit_bytes
        if self.is_divided:
            limit_bytes = limit_bytes * OWN_PER_FREE // (OWN_PER_FREE + 1)
        return limit_bytes if client.number is None else min(limit_bytes, self.client_limit_bytes)

    def used_by(self, client: Pinner) -> int:
        """Bytes that the client pins; for the server itself all that are pinned."""
        return self.used_bytes if client.number is None else self._client_bytes[client]

    def fits(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> bool:
        """Whether these may be pinned now, by segment id. What is pinned already needs no room."""
        new_bytes = 0
        for segment_id, size_bytes in sizes_bytes.items():
            if segment_id not in self._pins:
                new_bytes += size_bytes
        free_bytes = self.limit_bytes - self.used_bytes - new_bytes
        if free_bytes < 0:
            return False
        own_bytes = self._tenant_bytes[client.tenant] + new_bytes
        if self.is_divided and new_bytes and own_bytes > OWN_PER_FREE * free_bytes:
            return False
        if client.number is None:
            return True
        own_bytes = self._client_bytes[client]
        for segment_id, size_bytes in sizes_bytes.items():
            if (client, segment_id) not in self._client_pins:
                own_bytes += size_bytes
        return own_bytes <= self.client_limit_bytes

    def pin(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> None:
        """Count these as pinned once more."""
        for segment_id, size_bytes in sizes_bytes.items():
            if segment_id not in self._pins:
                self.used_bytes += size_bytes
                self._tenant_bytes[client.tenant] += size_bytes
            self._pins[segment_id] += 1
            if client.number is not None:
                self._client_bytes[client] += 0 if (client, segment_id) in self._client_pins else size_bytes
                self._client_pins[client, segment_id] += 1

    def unpin(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin` of these."""
        for segment_id, size_bytes in sizes_bytes.items():
            self._pins[segment_id] -= 1
            if not self._pins[segment_id]:
                del self._pins[segment_id]
                self.used_bytes -= size_bytes
                self._tenant_bytes[client.tenant] -= size_bytes
            if client.number is not None:
                self._client_pins[client, segment_id] -= 1
                if not self._client_pins[client, segment_id]:
                    del self._client_pins[client, segment_id]
                    self._client_bytes[client] -= size_bytes
        if not self._tenant_bytes[client.tenant]:
            del self._tenant_bytes[client.tenant]
        if not self._client_bytes[client]:
            del self._client_bytes[client]

    def pinned(self) -> Collection[int]:
        """Ids of what is pinned."""
        return self._pins.keys()


# The waiting line. Requests of one tenant are served in the order of coming: small requests never keep a
# large one from its room. A tenant whose next request leaves the tenant within its share goes before every
# other tenant. Tenants within their shares take turns by the order of coming; of the others the one that is
# least above its share goes first. Shares are those of `Shares`, of the tenants that have something or wait.
#
# Worst case: a request above its tenant's share waits for as long as other tenants are within theirs.
# Meanwhile its tenant gets nothing and what the tenant has is written, so that the tenant comes to be within
# its share as well.

LENGTH = 256
"""Requests that wait at a time. No tenant has all of the places; more requests are refused at once."""


@dataclass(slots=True, eq=False)
class RoomRequest:
    """So many bytes for an account; `number` tells the order of coming.

    The owner keeps `needed_bytes` up to date.
    """

    account: str
    needed_bytes: int
    number: int


class WaitingLine:
    """The requests that wait for room, of one budget. Owned by the event loop."""

    def __init__(self, what: str, shares: Shares, used_bytes: Mapping[str, int]) -> None:
        """`used_bytes`: what each tenant has of the budget, of those that have something.

        `what`: for refusals.
        """
        self._what, self._shares, self._used_bytes = what, shares, used_bytes
        self._waiting: dict[str, dict[RoomRequest, None]] = {}
        """The requests of each account that has some, in the order of coming."""
        self._count = 0
        self._last_number = 0

    def __len__(self) -> int:
        return self._count

    def join(self, tenant: str, needed_bytes: int) -> RoomRequest:
        """Begin to wait, until `leave`. Raises TooManyRequests."""
        account = self._shares.account(tenant)
        own_count = len(self._waiting.get(account, ()))
        if Bound(LENGTH, bool(self._shares)).is_reached(self._count, own_count):
            raise TooManyRequests(what=f"requests that wait for {self._what}", limit=LENGTH)
        self._last_number += 1
        request = RoomRequest(account, needed_bytes, self._last_number)
        self._waiting.setdefault(account, {})[request] = None
        self._count += 1
        return request

    def leave(self, request: RoomRequest) -> None:
        """End a wait: the room was given, or the caller gave up."""
        own = self._waiting[request.account]
        del own[request]
        self._count -= 1
        if not own:
            del self._waiting[request.account]

    def first(self, capacity_bytes: int) -> RoomRequest | None:
        """The request that gets the next room of a budget of so many bytes; None when nobody waits."""
        candidates = [next(iter(own)) for own in self._waiting.values()]
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        there_bytes = dict.fromkeys(self._waiting, 0) | dict(self._used_bytes)

        def place(request: RoomRequest) -> tuple[bool, int, int]:
            own_bytes = self._shares.guaranteed_bytes(request.account, there_bytes, capacity_bytes)
            above_bytes = there_bytes[request.account] - own_bytes
            is_above = above_bytes + request.needed_bytes > 0
            return is_above, above_bytes if is_above else 0, request.number

        return min(candidates, key=place)
