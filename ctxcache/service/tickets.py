"""Tickets: who may open a connection to the bulk channel. One use, a short life, a bounded number.

Owned by the event loop. A ticket is an id to find it by and a secret that is compared in constant
time. Worst case: as many as may wait do so, and new ones are refused until the oldest end.
"""

import hmac
import secrets
from dataclasses import dataclass

from ctxcache.clock import Clock
from ctxcache.errors import TooManyRequests, Unauthenticated

TICKET_LIFETIME_NS = 30 * 10**9
TICKET_LIMIT = 1024
"""Tickets that wait to be used, of all tenants."""
ID_BYTES, SECRET_BYTES = 8, 24


@dataclass(frozen=True, slots=True)
class _Issued:
    secret: bytes
    tenant: str
    deadline_ns: int


class Tickets:
    """What was issued and not used yet, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._issued: dict[bytes, _Issued] = {}

    def issue(self, tenant: str) -> bytes:
        """Make a ticket for one connection of that tenant. Raises TooManyRequests."""
        now_ns = self._clock.monotonic_ns()
        self._forget_past(now_ns)
        if len(self._issued) >= TICKET_LIMIT:
            raise TooManyRequests(what="bulk tickets", limit=TICKET_LIMIT)
        ticket_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._issued[ticket_id] = _Issued(secret, tenant, now_ns + TICKET_LIFETIME_NS)
        return ticket_id + secret

    def use(self, ticket: bytes) -> str:
        """End a ticket, good or not, and return its tenant. Raises Unauthenticated."""
        self._forget_past(self._clock.monotonic_ns())
        issued = self._issued.pop(ticket[:ID_BYTES], None)
        if issued is None or not hmac.compare_digest(issued.secret, ticket[ID_BYTES:]):
            raise Unauthenticated
        return issued.tenant

    def _forget_past(self, now_ns: int) -> None:
        for ticket_id, issued in list(self._issued.items()):
            if issued.deadline_ns > now_ns:
                return
            del self._issued[ticket_id]
