"""Dormant: sessions that nobody has used since the store was opened, as the records that they were read from.

    read ──► dormant ──► known, as the whole session that it is
                     looked up by name, uid, segment or key; its time has come; the coldest of its account

A session is dormant or known, never both. `left` is the only way out, and none leads back. While it is
dormant nothing of it is in memory, nobody uses it, no other session lists its segments, and its record is as
it was read. Its segments count as its tenant's, and their slots are taken. It takes some hundred bytes where
a known session takes thousands. Owned by the ledger.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

from ctxcache.core.ledger.segment import TenantUse
from ctxcache.core.ledger.session import Session

UID_BYTES = 16
Revive = Callable[[bytes, object, Callable[[int], object], TenantUse | None], Session]
"""Makes a session of its uid, its record and those of its segments, which are counted as that use.

Without one it has no segments.
"""


class Dormant:
    """Dormant sessions by number, in the order of their uids."""

    def __init__(self, opened_ns: int = 0, revive: Revive | None = None) -> None:
        """`opened_ns`: when the store was opened, in its time. Without `revive` there is none."""
        self.opened_ns = opened_ns
        self._revive = revive
        self.names: dict[str, dict[str, int]] = {}
        """The numbers of each tenant's sessions by id. To be looked at, not changed."""
        self.models: Counter[tuple[str, str]] = Counter()
        """How many of each tenant's model were there at the opening."""
        self.segment_count = 0
        self._uids = bytearray()
        self._kept: list[object | None] = []
        """The record that is read when a session comes to be known; None from then on."""
        self._tenants: list[str] = []
        self._tenant_names: dict[str, str] = {}
        self._slot_bytes = array("q")
        self.count = 0
        """How many are dormant."""
        self._segment_ids, self._owners, self._paths = array("Q"), array("I"), array("I")
        self._segments: list[object | None] = []
        self._by_use: dict[str, array[int]] = {}
        self._expire_times, self._by_expiry = array("q"), array("I")
        self._expired_count = 0

    # -- as the store is opened --------------------------------------------------------------------

    def add(self, uid: bytes, tenant: str, session_id: str, model_id: str, kept: object) -> int:
        """A session, whose uid is above those before; returns its number."""
        number = len(self._kept)
        # One text for all of a tenant's sessions, not one for each.
        tenant = self._tenant_names.setdefault(tenant, tenant)
        self._uids += uid
        self._kept.append(kept)
        self._tenants.append(tenant)
        self._slot_bytes.append(0)
        self.names.setdefault(tenant, {})[session_id] = number
        self.models[tenant, model_id] += 1
        self.count += 1
        return number

    def add_segment(self, segment_id: int, number: int, slot: tuple[int, int, int], kept: object) -> None:
        """A segment of session `number`, whose id is above those before."""
        path_index, _, size_bytes = slot
        self._slot_bytes[number] += size_bytes
        self._segment_ids.append(segment_id)
        self._owners.append(number)
        self._paths.append(path_index)
        self._segments.append(kept)
        self.segment_count += 1

    def order(self, by_use: "dict[str, array[int]]", by_expiry: "array[int]", times: "array[int]") -> None:
        """The sessions of each account by their last use, and all by when they expire, at `times`."""
        for numbers in by_use.values():
            # The one that was used longest ago is taken from the end.
            numbers.reverse()
        self._by_use, self._by_expiry, self._expire_times = by_use, by_expiry, times

    # -- looks -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Their numbers. Sessions may come to be known meanwhile."""
        return (number for number, kept in enumerate(self._kept) if kept is not None)

    def accounts(self, among: Sequence[str] | None) -> list[str]:
        """Those of these accounts, None for all, that have some, or had."""
        return list(self._by_use) if among is None else [each for each in among if each in self._by_use]

    def named(self, tenant: str, session_id: str) -> int | None:
        """The number of a tenant's session."""
        names = self.names.get(tenant)
        return None if names is None else names.get(session_id)

    def tenant(self, number: int) -> str:
        """A session's tenant."""
        return self._tenants[number]

    def uid(self, number: int) -> bytes:
        """A session's uid."""
        return bytes(self._uids[number * UID_BYTES : (number + 1) * UID_BYTES])

    def with_uid(self, uid: bytes) -> int | None:
        """The number of a session."""
        number = bisect_left(range(len(self._kept)), uid, key=self.uid) if self.count else 0
        is_there = number < len(self._kept) and self._kept[number] is not None
        return number if is_there and self.uid(number) == uid else None

    def lister(self, segment_id: int) -> int | None:
        """The number of the session that lists a segment."""
        i = self._at(segment_id)
        return None if i is None else self._owners[i]

    def slot_bytes(self, number: int) -> int:
        """Bytes of a session's slots."""
        return self._slot_bytes[number]

    def durable_bytes(self) -> Counter[str]:
        """Bytes of each tenant's slots."""
        found: Counter[str] = Counter()
        for tenant, names in self.names.items():
            found[tenant] = sum(self._slot_bytes[number] for number in names.values())
        return found

    def revived(self, number: int, use: TenantUse | None) -> Session:
        """A session as it would be if it were known, with its segments, which no session lists yet.

        They are counted as `use`; None: without them.
        """
        assert self._revive is not None  # noqa: S101  # it comes with them
        return self._revive(self.uid(number), self._kept[number], self.kept_segment, use)

    def kept(self, number: int) -> object:
        """The record of a session."""
        return self._kept[number]

    def kept_segment(self, segment_id: int) -> object:
        """The record of a segment. Raises KeyError(segment_id)."""
        i = self._at(segment_id)
        if i is None:
            raise KeyError(segment_id)
        return self._segments[i]

    @property
    def last_path(self) -> int:
        """The highest number of a path that any of their segments was on at the opening, or 0."""
        return max(self._paths, default=0)

    def on_paths(self, paths: Collection[int]) -> Iterator[int]:
        """Sessions that have a segment there. Sessions may come to be known meanwhile."""
        return (
            owner
            for path, owner in zip(self._paths, self._owners, strict=True)
            if path in paths and self._kept[owner] is not None
        )

    # -- which come to be known --------------------------------------------------------------------

    def coldest(self, account: str) -> int | None:
        """The session of the account that was used longest ago."""
        numbers: Sequence[int] = self._by_use.get(account, ())
        while numbers and self._kept[numbers[-1]] is None:
            self._by_use[account].pop()
        return numbers[-1] if numbers else None

    def due(self, now_ns: int, limit: int) -> list[int]:
        """At most so many sessions whose time has come."""
        found: list[int] = []
        while self._expired_count < len(self._by_expiry) and len(found) < limit:
            if self._expire_times[self._expired_count] > now_ns:
                break
            number = self._by_expiry[self._expired_count]
            self._expired_count += 1
            if self._kept[number] is not None:
                found.append(number)
        return found

    def left(self, number: int, tenant: str, session_id: str, segment_ids: Collection[int]) -> None:
        """The session is known from here on; these were its dormant segments."""
        self._kept[number] = None
        del self.names[tenant][session_id]
        self.count -= 1
        self.segment_count -= len(segment_ids)
        for segment_id in segment_ids:
            i = self._at(segment_id)
            assert i is not None  # noqa: S101  # they are looked up once
            self._segments[i] = None

    def _at(self, segment_id: int) -> int | None:
        ids = self._segment_ids
        i = bisect_left(ids, segment_id)
        return i if i < len(ids) and ids[i] == segment_id and self._segments[i] is not None else None
