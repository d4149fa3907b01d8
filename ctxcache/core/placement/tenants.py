"""Tenants: a policy for each account, and shares that say whose is asked.

Counts what each account has from what it hears, so that a ledger needs to know nothing of tenants. Room is
needed by whom the last event was about. Retained sessions leave after the others of their account.
Worst case: as many policies as there are accounts; what a pinned session was refused counts as if it had it.
"""

from collections.abc import Callable, Iterator, Sequence

from ctxcache.core.placement.policy import Accepts, Capacities, Facts, Policy, Tier
from ctxcache.core.placement.retention import Retention
from ctxcache.core.placement.shares import Shares


class PerTenant(Policy):
    """Sessions by account, each account with a policy of its own."""

    def __init__(
        self,
        shares: Shares,
        capacities: Capacities,
        make_policy: Callable[[], Policy],
        tenant: Callable[[bytes], str],
        retention: Retention | None = None,
    ) -> None:
        """`tenant` of a session, which never changes."""
        self._shares = shares
        self._capacities = capacities
        self._policies = {account: make_policy() for account in shares.accounts}
        self._tenant = tenant
        self._retention = retention
        self._sizes: dict[bytes, int] = {}
        self._tiers: dict[bytes, Tier] = {}
        self._total_bytes = dict.fromkeys(shares.accounts, 0)
        self._dram_bytes = dict.fromkeys(shares.accounts, 0)
        self._needing: str | None = None
        self._needed_bytes = self._needed_dram_bytes = 0

    def used_bytes(self, account: str) -> int:
        """Bytes of the account's sessions, in both tiers."""
        return self._total_bytes[account]

    def arrived(self, uid: bytes, now_s: float) -> None:
        """See Policy."""
        self._needs(uid, 0, self._sizes[uid] if self._tiers.get(uid) is Tier.SSD else 0)
        self._policy(uid).arrived(uid, now_s)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        needed_bytes = 0 if uid in self._tiers else facts.size_bytes
        self._needs(uid, needed_bytes, needed_bytes)
        self._count(uid, -1)
        self._sizes[uid] = facts.size_bytes
        self._count(uid, 1)
        self._policy(uid).idle(uid, facts, now_s)
        if self._retention:
            self._retention.expire(now_s)
            self._retention.resized(uid, facts.size_bytes, now_s)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float) -> None:
        """See Policy."""
        self._sizes[uid] = facts.size_bytes
        self._policy(uid).recalled(uid, facts, idle_s)

    def passed(self, now_s: float) -> None:
        """See Policy."""
        if self._retention:
            self._retention.expire(now_s)
        for policy in self._policies.values():
            policy.passed(now_s)

    def placed(self, uid: bytes, tier: Tier) -> None:
        """See Policy."""
        if uid not in self._tiers:
            self._needs(uid, 0, 0)
        self._count(uid, -1)
        self._tiers[uid] = tier
        self._count(uid, 1)
        self._policy(uid).placed(uid, tier)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        self._forget(uid)
        self._policy(uid).evicted(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self._forget(uid)
        self._policy(uid).ended(uid)

    def hinted(self, uid: bytes, order: float) -> None:
        """See Policy."""
        self._policy(uid).hinted(uid, order)

    def withdrawn(self, uid: bytes) -> None:
        """See Policy."""
        self._policy(uid).withdrawn(uid)

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See Policy."""
        self._policy(uid).expected(uid, return_s)

    def evict(self, accepts: Accepts) -> bytes | None:
        """See Policy; nobody's of an account that is within its share, but for that account's own need."""
        asked = self._shares.whose(
            self._needing, self._needed_bytes, self._total_bytes, self._capacities.total_bytes
        )
        level = self._retention.store_level if self._retention else None
        return self._first(asked, lambda policy: policy.evict, accepts, level)

    def demote(self, accepts: Accepts) -> bytes | None:
        """See Policy; as `evict`, by shares of DRAM."""
        asked = self._shares.whose(
            self._needing, self._needed_dram_bytes, self._dram_bytes, self._capacities.dram_bytes
        )
        level = self._retention.dram_level if self._retention else None
        return self._first(asked, lambda policy: policy.demote, accepts, level)

    def gives_way(self, uid: bytes, comer: bytes) -> bool:
        """See Policy; who is asked for another account gives way, and to what is retained all that are asked."""
        if self._account(uid) != self._account(comer):
            return True
        if self._retention:
            level, comers_level = self._retention.store_level(uid), self._retention.store_level(comer)
            if level or comers_level:
                return comers_level > 0
        return self._policy(uid).gives_way(uid, comer)

    def prefetch(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """See Policy."""
        for policy in self._policies.values():
            uid = policy.prefetch(accepts)
            if uid is not None:
                self._needs(uid, 0, self._sizes.get(uid, 0))
                return uid
        return None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """See Policy."""
        return self._policy(uid).is_needed_soon(uid, fetched)

    def _first(
        self,
        asked: Sequence[str],
        choice: Callable[[Policy], Callable[[Accepts], bytes | None]],
        accepts: Accepts,
        level: Callable[[bytes], int] | None,
    ) -> bytes | None:
        for account in asked:
            for accepted in _by_level(accepts, level):
                victim = choice(self._policies[account])(accepted)
                if victim is not None:
                    return victim
        return None

    def _needs(self, uid: bytes, size_bytes: int, dram_bytes: int) -> None:
        self._needing = self._account(uid)
        self._needed_bytes, self._needed_dram_bytes = size_bytes, dram_bytes

    def _count(self, uid: bytes, sign: int) -> None:
        tier = self._tiers.get(uid)
        if tier is not None:
            account, size_bytes = self._account(uid), sign * self._sizes[uid]
            self._total_bytes[account] += size_bytes
            self._dram_bytes[account] += size_bytes if tier is Tier.DRAM else 0

    def _forget(self, uid: bytes) -> None:
        self._count(uid, -1)
        self._sizes.pop(uid, None)
        self._tiers.pop(uid, None)
        if self._retention:
            self._retention.release(uid)

    def _account(self, uid: bytes) -> str:
        return self._shares.account(self._tenant(uid))

    def _policy(self, uid: bytes) -> Policy:
        return self._policies[self._account(uid)]


def _by_level(accepts: Accepts, level: Callable[[bytes], int] | None) -> Iterator[Accepts]:
    """Those without a class, then class by class as far as there are any."""
    if level is None:
        yield accepts
        return
    levels: set[int] = set()

    def is_free(uid: bytes) -> bool:
        if not accepts(uid):
            return False
        levels.add(level(uid))
        return not level(uid)

    yield is_free
    for present in sorted(levels - {0}):
        yield lambda uid, present=present: accepts(uid) and level(uid) == present  # type: ignore[misc]
