"""Retaining: sessions a client asked to keep. `retain` keeps a session in the store, `pin` also in memory.

Both expire, and count against the tenant's budget; `core.placement.retention` has the rules. Segments that
forks share count for each of them. Retentions and pins end with the process. Worst case: a session that grows
past its grant while the budget is taken has no class any more.
"""

from collections.abc import Callable, Mapping

from ctxcache.core.ledger.session import Session
from ctxcache.core.limits import SECOND_NS, Limits
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.retention import Grant, Grants, Retention
from ctxcache.core.placement.shares import Shares


class Retaining:
    """Grants, and the classes that they put sessions into. Owned by the ledger."""

    def __init__(
        self,
        now_s: Callable[[], float],
        sessions: Mapping[bytes, Session],
        capacities: Capacities,
        limits: Limits,
        shares: Shares,
        fallen: Callable[[Session], None],
    ) -> None:
        self._now_s = now_s
        self._sessions = sessions
        self._shares = shares
        self._fallen = fallen

        def grants(budget_bytes: int) -> Grants:
            return Grants(budget_bytes, shares, self._account, self._fell)

        self._retention = Retention(
            grants(int(limits.retention_share * capacities.below_bytes)),
            grants(int(limits.pin_share * capacities.memory_bytes)),
            longest_s=limits.retention_ns / SECOND_NS,
        )
        self.retained = self._retention.retained.granted
        self.pinned = self._retention.pinned.granted
        """Sessions that have grants, by uid. To be looked at, not changed."""
        self.store_level = self._retention.store_level
        self.memory_level = self._retention.memory_level
        self.release = self._retention.release

    def retain(self, uid: bytes, size_bytes: int, until_s: float, priority: int) -> Grant | None:
        """Let a session leave the store after all that are not retained, until then, in monotonic seconds.

        `size_bytes` of segments may be kept. None where the session has more, for it leaves whole; where the
        session is unknown; and where the budget is taken by grants of its priority or above. A session that
        grows past `size_bytes` asks anew by itself.
        """
        return self._ask(self._retention.retain, uid, size_bytes, until_s, priority)

    def pin(self, uid: bytes, size_bytes: int, until_s: float, priority: int) -> Grant | None:
        """Let what a session has in memory leave it after all that is not pinned, and the store too.

        See `retain`.
        """
        return self._ask(self._retention.pin, uid, size_bytes, until_s, priority)

    def rested(self, session: Session) -> None:
        """The session may have grown."""
        if self._retention.store_level(session.uid):
            self._retention.resized(session.uid, session.size_bytes, self._now_s())

    def passed(self) -> None:
        """Time passes: what was granted until now is over."""
        self._retention.expire(self._now_s())

    def used_bytes(self, tenant: str) -> tuple[int, int]:
        """The bytes granted to the tenant, or to all where tenants are not told apart.

        Retained, and pinned.
        """
        account = self._shares.account(tenant)
        return self._retention.retained.used_bytes(account), self._retention.pinned.used_bytes(account)

    def _ask(
        self,
        ask: Callable[[bytes, int, float, int, float], Grant | None],
        uid: bytes,
        size_bytes: int,
        until_s: float,
        priority: int,
    ) -> Grant | None:
        session = self._sessions.get(uid)
        if session is None or size_bytes < session.size_bytes:
            return None
        self.passed()
        return ask(uid, size_bytes, until_s, priority, self._now_s())

    def _account(self, uid: bytes) -> str:
        return self._shares.account(self._sessions[uid].tenant)

    def _fell(self, uid: bytes) -> None:
        session = self._sessions.get(uid)
        if session is not None:
            self._fallen(session)
