"""Waiting line: which request gets the next room of a budget that tenants divide. Decisions only; nothing waits here.

Requests of one tenant are served in the order of coming: small ones never keep a large one from its room. A tenant
whose next request leaves it within its share goes before every tenant of which that is not so. Tenants within their
shares take turns by the order of coming; of the others the one goes first that is least above its share. Shares are
those of `Shares`, of the tenants that have something or wait.

Worst case: a request above its share gives way for as long as others are within theirs. As long as it waits its
tenant gets nothing, while what the tenant has is written: so the tenant comes to be within its share as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ctxcache.core.limits import Bound
from ctxcache.core.placement.shares import Shares
from ctxcache.errors import TooManyRequests

LENGTH = 256
"""Requests that wait at a time. No tenant has all of the places; more requests are refused at once."""


@dataclass(slots=True, eq=False)
class Request:
    """So many bytes for an account; `number` tells the order of coming. The owner keeps `needed_bytes` up to date."""

    account: str
    needed_bytes: int
    number: int


class WaitingLine:
    """The requests that wait for room, of one budget. Owned by the event loop."""

    def __init__(self, what: str, shares: Shares, used_bytes: Mapping[str, int]) -> None:
        """`used_bytes`: what each tenant has of the budget, of those that have something. `what`: for refusals."""
        self._what, self._shares, self._used_bytes = what, shares, used_bytes
        self._waiting: dict[str, dict[Request, None]] = {}
        """Of each account that has some: its requests, in the order of coming."""
        self._count = 0
        self._last_number = 0

    def __len__(self) -> int:
        return self._count

    def join(self, tenant: str, needed_bytes: int) -> Request:
        """Begin to wait, until `leave`. Raises TooManyRequests."""
        account = self._shares.account(tenant)
        own_count = len(self._waiting.get(account, ()))
        if Bound(LENGTH, bool(self._shares)).is_reached(self._count, own_count):
            raise TooManyRequests(what=f"requests that wait for {self._what}", limit=LENGTH)
        self._last_number += 1
        request = Request(account, needed_bytes, self._last_number)
        self._waiting.setdefault(account, {})[request] = None
        self._count += 1
        return request

    def leave(self, request: Request) -> None:
        """Wait no more: the room was given, or nobody wants it."""
        own = self._waiting[request.account]
        del own[request]
        self._count -= 1
        if not own:
            del self._waiting[request.account]

    def first(self, capacity_bytes: int) -> Request | None:
        """The request that gets the next room of a budget of so many bytes; None when nobody waits."""
        candidates = [next(iter(own)) for own in self._waiting.values()]
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        there_bytes = dict.fromkeys(self._waiting, 0) | dict(self._used_bytes)

        def place(request: Request) -> tuple[bool, int, int]:
            own_bytes = self._shares.guaranteed_bytes(request.account, there_bytes, capacity_bytes)
            above_bytes = there_bytes[request.account] - own_bytes
            is_above = above_bytes + request.needed_bytes > 0
            return is_above, above_bytes if is_above else 0, request.number

        return min(candidates, key=place)
