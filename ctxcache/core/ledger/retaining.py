"""Retaining: sessions a client asked to keep. `retain` keeps a session in the store, `pin` also in memory.

A grant moves nothing and holds nothing: it puts a session into a class. Sessions without a class leave first,
then the classes, the lowest priority first. So a retained session still leaves when nothing else can, and no
grant can wedge a tier. A session is granted whole or not at all, for it leaves whole. Segments that forks
share count for each of them. The budget is divided by the tenants' shares: a request displaces another
account's grants only where those are above that account's share. Grants expire, and end with the process.
Time comes with each call. Everything takes O(log n), and a look at each account with grants. Worst case: a
share is taken by grants of the same priority, and the next request is refused until one expires; a session
that grows past its grant while the budget is taken has no class any more.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ctxcache.core.ledger.session import Session
from ctxcache.core.limits import SECOND_NS, Limits
from ctxcache.core.placement.order import Keyed
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.shares import Shares

TOP_PRIORITY = 100
"""Priorities go from 0 to this; what is beyond is taken as the nearest."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A grant: so many bytes, until then."""

    size_bytes: int
    until_s: float


@dataclass(frozen=True, slots=True)
class Granted:
    """A grant that holds: whose it is, and what it may be displaced by."""

    account: str
    size_bytes: int
    until_s: float
    priority: int


class Grants:
    """Grants against one budget, which accounts have shares of. Owned by its caller."""

    def __init__(
        self,
        budget_bytes: int,
        shares: Shares,
        account: Callable[[bytes], str],
        fallen: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`account` of a session; `fallen` hears of each that came into a lower class, or lost its own."""
        self._budget_bytes = budget_bytes
        self._shares = shares
        self._account = account
        self._fallen = fallen
        self.granted: dict[bytes, Granted] = {}
        """By session. To be looked at, not changed."""
        self._used: dict[str, int] = {}
        """Bytes granted, by account."""
        self._all_used_bytes = 0
        self._by_priority: Counter[tuple[str, int]] = Counter()
        self._lowest: dict[str, Keyed] = {}
        self._due = Keyed()

    def __len__(self) -> int:
        return len(self.granted)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self.granted

    def used_bytes(self, account: str) -> int:
        """Bytes granted to the account's sessions."""
        return self._used.get(account, 0)

    def level(self, uid: bytes) -> int:
        """The session's class: 0 without a grant, else higher with its priority."""
        granted = self.granted.get(uid)
        return granted.priority + 1 if granted else 0

    def ask(self, uid: bytes, size_bytes: int, until_s: float, priority: int, now_s: float) -> Grant | None:
        """Grant a session so many bytes, in place of what it was granted before.

        None: there is no room for it but that of grants no lower than it, or its time is over; what was
        granted before stays then.
        """
        # A grant of the past would be taken back at the next tick, and displace others until then.
        if until_s <= now_s:
            return None
        priority = min(max(priority, 0), TOP_PRIORITY)
        asked = Granted(self._account(uid), max(size_bytes, 0), until_s, priority)
        before = self.granted.get(uid)
        if asked.size_bytes > self._room_bytes(asked, before):
            return None
        if before:
            # Its own bytes count as free while room is made: a session that grows needs only what it grew by.
            self._remove(uid, before)
        # Two bounds, one after the other:
        #
        #     within the account    the account's lowest grants go until it is within its share with this one
        #     within the budget     the account furthest above its share gives its lowest grants
        #
        # The first loop needs no other account. The second is needed when others took what this one had not
        # used.
        limit_bytes = self._limit_bytes(asked.account)
        while self.used_bytes(asked.account) + asked.size_bytes > limit_bytes:
            # There is one, for the room was counted.
            self._release_lowest(asked.account)
        while self._all_used_bytes + asked.size_bytes > self._budget_bytes:
            # This account is within its share, so the one furthest above its share is another.
            self._release_lowest(self._shares.whose(None, 0, self._used_beside(asked), self._budget_bytes)[0])
        self._add(uid, asked)
        # Only a lower class than before has to be told: rankings look rising ranks up by themselves.
        if before and before.priority > priority:
            self._fallen(uid)
        return Grant(asked.size_bytes, until_s)

    def resized(self, uid: bytes, size_bytes: int, now_s: float) -> None:
        """The session has that size now. Its growth is granted too, or it loses its class."""
        granted = self.granted.get(uid)
        # Growth within the grant was paid for.
        if granted is None or size_bytes <= granted.size_bytes:
            return
        if self.ask(uid, size_bytes, granted.until_s, granted.priority, now_s) is None:
            # It leaves whole, so that a part that is granted protects nothing.
            self.release(uid)

    def release(self, uid: bytes) -> None:
        """Take a grant back, or the session is gone; nothing where there is none."""
        granted = self.granted.get(uid)
        if granted:
            self._remove(uid, granted)
            self._fallen(uid)

    def expire(self, now_s: float) -> None:
        """Take back what was granted until now, or earlier."""
        # Called with every request as well as by time: an expired grant takes no room from a new one.
        while (uid := self._due.first()) is not None and self.granted[uid].until_s <= now_s:
            self.release(uid)

    def _room_bytes(self, asked: Granted, before: Granted | None) -> int:
        """The bytes that the session could be granted.

        The free bytes, its own, and those granted to lower classes.
        """
        account = asked.account
        # The same priority does not give way: two equal requests would displace each other in turns.
        lower_bytes = sum(self._by_priority[account, priority] for priority in range(asked.priority))
        own_bytes = before.size_bytes if before and before.priority >= asked.priority else 0
        return self._limit_bytes(account) - self.used_bytes(account) + lower_bytes + own_bytes

    def _limit_bytes(self, account: str) -> int:
        return self._shares.guaranteed_bytes(account, self._used, self._budget_bytes)

    def _used_beside(self, asked: Granted) -> dict[str, int]:
        return self._used | {asked.account: self.used_bytes(asked.account) + asked.size_bytes}

    def _release_lowest(self, account: str) -> None:
        lowest = self._lowest[account].first()
        if lowest is not None:
            self.release(lowest)

    def _add(self, uid: bytes, granted: Granted) -> None:
        self.granted[uid] = granted
        self._count(granted.account, granted.size_bytes)
        self._by_priority[granted.account, granted.priority] += granted.size_bytes
        self._lowest.setdefault(granted.account, Keyed()).put(uid, (granted.priority, granted.until_s))
        # Two orders of the same grants: by class, for what is displaced, and by time, for what expires.
        self._due.put(uid, (granted.until_s,))

    def _remove(self, uid: bytes, granted: Granted) -> None:
        del self.granted[uid]
        self._count(granted.account, -granted.size_bytes)
        self._by_priority[granted.account, granted.priority] -= granted.size_bytes
        self._lowest[granted.account].discard(uid)
        self._due.discard(uid)

    def _count(self, account: str, size_bytes: int) -> None:
        self._all_used_bytes += size_bytes
        self._used[account] = self.used_bytes(account) + size_bytes
        if not self._used[account]:
            del self._used[account]


class Retention:
    """Sessions that a client asked to keep.

    `retain` keeps a session in the store, `pin` also in memory. Owned by its caller.
    """

    def __init__(self, retained: Grants, pinned: Grants, *, longest_s: float) -> None:
        """No grant lasts longer than `longest_s`."""
        self.retained = retained
        self.pinned = pinned
        self._longest_s = longest_s

    def retain(
        self, uid: bytes, size_bytes: int, until_s: float, priority: int, now_s: float
    ) -> Grant | None:
        """Let the session leave the store after all that are not retained. See `Grants.ask`."""
        return self.retained.ask(uid, size_bytes, min(until_s, now_s + self._longest_s), priority, now_s)

    def pin(self, uid: bytes, size_bytes: int, until_s: float, priority: int, now_s: float) -> Grant | None:
        """Let the session leave memory, and the store, after all that are not pinned. See `Grants.ask`."""
        return self.pinned.ask(uid, size_bytes, min(until_s, now_s + self._longest_s), priority, now_s)

    def release(self, uid: bytes) -> None:
        """Neither retained nor pinned any more, or gone."""
        self.retained.release(uid)
        self.pinned.release(uid)

    def resized(self, uid: bytes, size_bytes: int, now_s: float) -> None:
        """See `Grants.resized`."""
        self.retained.resized(uid, size_bytes, now_s)
        self.pinned.resized(uid, size_bytes, now_s)

    def expire(self, now_s: float) -> None:
        """See `Grants.expire`."""
        self.retained.expire(now_s)
        self.pinned.expire(now_s)

    def store_level(self, uid: bytes) -> int:
        """The session's class where it is about leaving the store."""
        return max(self.retained.level(uid), self.pinned.level(uid))

    def memory_level(self, uid: bytes) -> int:
        """The session's class where it is about leaving memory."""
        return self.pinned.level(uid)


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
        # A request for less than there is would protect a part, and the session leaves whole.
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
