"""Tickets: who may open a connection to the bulk channel. One use, a short life, a bounded number.

Owned by the event loop. A ticket is an id to find it by and a secret that is compared in constant
time. Worst case: as many as may wait do so, and new ones are refused until the oldest end.
"""

import hmac
import secrets
from dataclasses import dataclass

from ctxcache.core.limits import Bound
from ctxcache.errors import TooManyRequests, Unauthenticated
from ctxcache.runtime.clock import Clock
from ctxcache.service.caller import Caller

TICKET_LIFETIME_NS = 30 * 10**9
TICKET_LIMIT = 1024
"""Tickets that wait to be used, of all tenants."""
ID_BYTES, SECRET_BYTES = 8, 24


@dataclass(frozen=True, slots=True)
class _Issued:
    secret: bytes
    caller: Caller
    deadline_ns: int


class Tickets:
    """What was issued and not used yet, oldest first."""

    def __init__(self, clock: Clock, *, are_divided: bool = False) -> None:
        self._clock = clock
        self._bound = Bound(TICKET_LIMIT, are_divided)
        self._issued: dict[bytes, _Issued] = {}

    def issue(self, caller: Caller) -> bytes:
        """Make a ticket for one connection of that caller. Raises TooManyRequests."""
        now_ns = self._clock.monotonic_ns()
        self._forget_past(now_ns)
        own = sum(issued.caller.tenant == caller.tenant for issued in self._issued.values())
        if self._bound.is_reached(len(self._issued), own):
            raise TooManyRequests(what="bulk tickets", limit=TICKET_LIMIT)
        ticket_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._issued[ticket_id] = _Issued(secret, caller, now_ns + TICKET_LIFETIME_NS)
        return ticket_id + secret

    def use(self, ticket: bytes) -> Caller:
        """End a ticket, good or not, and return whose it was. Raises Unauthenticated."""
        self._forget_past(self._clock.monotonic_ns())
        issued = self._issued.pop(ticket[:ID_BYTES], None)
        if issued is None or not hmac.compare_digest(issued.secret, ticket[ID_BYTES:]):
            raise Unauthenticated
        issued.caller.check()
        return issued.caller

    def _forget_past(self, now_ns: int) -> None:
        for ticket_id, issued in list(self._issued.items()):
            if issued.deadline_ns > now_ns:
                return
            del self._issued[ticket_id]
