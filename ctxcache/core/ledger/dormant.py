"""Dormant: sessions that nobody uses, as the records that they are read from.

    the store is opened ──► dormant ◄── known: idle for long, durable, nothing of it in memory
                               │          ▲
                               └──────────┘ as the whole session that it is:
                     looked up by name, uid, segment or key; its time has come; the coldest of its account

A session is dormant or known, never both. `add` is the only way in, and `left` the only way out. A dormant
session has nothing in memory, nobody uses it, no other session lists its segments, and its record is as it
was read or written last. Its segments count as its tenant's, and their slots are taken. It takes some hundred
bytes where a known session takes thousands. Owned by the ledger.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Self

from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.usage import TenantUse
from ctxcache.core.placement.shares import EVERYONE

UID_BYTES = 16
PIECE = 1 << 10
"""Numbers that are moved at once."""
Revive = Callable[[bytes, object, Callable[[int], object], TenantUse | None], Session]
"""Makes a session of its uid, its record and those of its segments, which count in the given use.

Without a use the session has no segments.
"""


# A number comes into the middle of a million: the pieces bound what is moved. Twelve bytes each, where a dict
# of objects takes a hundred.
class Line:
    """Numbers in the order of their keys, then of themselves. O(log n), and a short move of memory."""

    def __init__(self, kind: str) -> None:
        """`kind`: the type of the keys, as `array` names it."""
        self._kind = kind
        self._keys: list[array[int]] = []
        self._numbers: list[array[int]] = []
        self._firsts: list[tuple[int, int]] = []
        """The first key and number of each piece."""

    @classmethod
    def of(cls, kind: str, keys: "array[int]", numbers: "array[int]") -> Self:
        """A line of ascending keys. Equal keys ascend by their numbers."""
        line = cls(kind)
        line.extend(keys, numbers)
        return line

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Each key and its number, in order. The line must not change meanwhile."""
        for keys, numbers in zip(self._keys, self._numbers, strict=True):
            yield from zip(keys, numbers, strict=True)

    def extend(self, keys: "array[int]", numbers: "array[int]") -> None:
        """Put numbers behind all others of the line, in order as `of` takes them."""
        begin = PIECE - len(self._keys[-1]) if self._keys else 0
        if begin:
            self._keys[-1].extend(keys[:begin])
            self._numbers[-1].extend(numbers[:begin])
        for first in range(begin, len(keys), PIECE):
            part = slice(first, first + PIECE)
            self._split_in(len(self._firsts), keys[part], numbers[part], (keys[first], numbers[first]))

    def add(self, key: int, number: int) -> None:
        """Put a number where its key belongs."""
        if not self._firsts:
            self._split_in(0, array(self._kind), array("I"), (key, number))
        keys, numbers = self._keys[-1], self._numbers[-1]
        if keys and len(keys) < PIECE and key > keys[-1]:
            # Records are read in this order.
            keys.append(key)
            numbers.append(number)
            return
        at = max(bisect_right(self._firsts, (key, number)) - 1, 0)
        keys, numbers = self._keys[at], self._numbers[at]
        i = _place(keys, numbers, key, number)
        keys.insert(i, key)
        numbers.insert(i, number)
        self._firsts[at] = keys[0], numbers[0]
        if len(keys) > PIECE:
            # A piece that grew at its end is cut there: numbers that come in order fill their pieces.
            middle = PIECE if i == PIECE else PIECE // 2
            self._split_in(at + 1, keys[middle:], numbers[middle:], (keys[middle], numbers[middle]))
            del keys[middle:], numbers[middle:]

    def discard(self, key: int, number: int) -> None:
        """Take a number out, if the line has it."""
        at = bisect_right(self._firsts, (key, number)) - 1
        if at < 0:
            return
        keys, numbers = self._keys[at], self._numbers[at]
        i = _place(keys, numbers, key, number)
        if i == len(keys) or (keys[i], numbers[i]) != (key, number):
            return
        del keys[i], numbers[i]
        if keys:
            self._firsts[at] = keys[0], numbers[0]
        else:
            del self._keys[at], self._numbers[at], self._firsts[at]

    def numbers(self, key: int) -> Iterator[int]:
        """The numbers of a key."""
        at = max(bisect_right(self._firsts, (key, -1)) - 1, 0)
        for keys, numbers in zip(islice(self._keys, at, None), islice(self._numbers, at, None), strict=True):
            begin = bisect_left(keys, key)
            end = bisect_right(keys, key, begin)
            yield from numbers[begin:end]
            if end < len(keys):
                return

    @property
    def first(self) -> int | None:
        """The number whose key is the least."""
        return self._firsts[0][1] if self._firsts else None

    def _split_in(self, at: int, keys: "array[int]", numbers: "array[int]", first: tuple[int, int]) -> None:
        self._keys.insert(at, keys)
        self._numbers.insert(at, numbers)
        self._firsts.insert(at, first)


def _place(keys: "array[int]", numbers: "array[int]", key: int, number: int) -> int:
    begin = bisect_left(keys, key)
    return bisect_left(numbers, number, begin, bisect_right(keys, key, begin))


class Dormant:
    """Dormant sessions by number. A number is given again after its session has left."""

    def __init__(self, revive: Revive | None = None, *, is_by_tenant: bool = False) -> None:
        """Without `revive` no session is dormant. `is_by_tenant`: each tenant is an account of its own."""
        self._revive = revive
        self._is_by_tenant = is_by_tenant
        self.names: dict[str, dict[str, int]] = {}
        """The numbers of each tenant's sessions by id. To be looked at, not changed."""
        self.count = self.segment_count = 0
        """How many are dormant, and how many segments they list."""
        self._uids = bytearray()
        self._kept: list[object | None] = []
        """The record that is read when a session comes to be known; None where a number is free."""
        self._tenants: list[str] = []
        self._tenant_names: dict[str, str] = {}
        self._slot_bytes, self._idle_s, self._turn_counts = array("q"), array("d"), array("I")
        self._free: list[int] = []
        # Segments have rows of their own: most sessions have one, and some have a hundred.
        self._owners, self._paths = array("I"), array("I")
        self._segments: list[object | None] = []
        self._free_rows: list[int] = []
        self._by_uid, self._by_segment_id, self._by_expiry = Line("Q"), Line("Q"), Line("q")
        self._by_use: dict[str, Line] = {}

    # -- the way in ----------------------------------------------------------------------------------

    def add(
        self, uid: bytes, tenant: str, session_id: str, kept: object, *, idle_s: float, turn_count: int = 1
    ) -> int:
        """Make a session dormant; returns its number. `timed`, or `order`, is to follow.

        `idle_s`: how long the session was idle when the store was opened, as the policy's `recalled` takes
        it.
        """
        # A tenant's name is one text for all its sessions.
        tenant = self._tenant_names.setdefault(tenant, tenant)
        if self._free:
            number = self._free.pop()
            self._uids[number * UID_BYTES : (number + 1) * UID_BYTES] = uid
            self._kept[number], self._tenants[number] = kept, tenant
            self._slot_bytes[number], self._idle_s[number] = 0, idle_s
            self._turn_counts[number] = turn_count
        else:
            number = len(self._kept)
            self._uids += uid
            self._kept.append(kept)
            self._tenants.append(tenant)
            self._slot_bytes.append(0)
            self._idle_s.append(idle_s)
            self._turn_counts.append(turn_count)
        self.names.setdefault(tenant, {})[session_id] = number
        self._by_uid.add(_key(uid), number)
        self.count += 1
        return number

    def add_read(
        self,
        uids: bytes,
        tenants: Sequence[str],
        session_ids: Sequence[str],
        kept: Sequence[object],
        idle_s: "array[float]",
    ) -> range:
        """As `add`, for many sessions in the order of their uids, behind all others; their numbers."""
        count = len(session_ids)
        numbers = range(len(self._kept), len(self._kept) + count)
        texts = self._tenant_names
        self._tenants += [texts.setdefault(tenant, tenant) for tenant in tenants]
        self._uids += uids
        self._kept += kept
        self._slot_bytes.extend(array("q", bytes(8 * count)))
        self._idle_s.extend(idle_s)
        self._turn_counts.extend(array("I", [1]) * count)
        among = set(tenants)
        if len(among) == 1:
            self.names.setdefault(texts[among.pop()], {}).update(zip(session_ids, numbers, strict=True))
        else:
            for tenant, session_id, number in zip(
                self._tenants[numbers.start :], session_ids, numbers, strict=True
            ):
                self.names.setdefault(tenant, {})[session_id] = number
        # The key of a uid is its first eight bytes.
        keys = array("Q", uids)[::2]
        if sys.byteorder == "little":
            keys.byteswap()
        self._by_uid.extend(keys, array("I", numbers))
        self.count += count
        return numbers

    def add_segment(self, segment_id: int, number: int, slot: tuple[int, int, int], kept: object) -> None:
        """Add a segment of session `number`."""
        path_index, _, size_bytes = slot
        self._slot_bytes[number] += size_bytes
        if self._free_rows:
            row = self._free_rows.pop()
            self._owners[row], self._paths[row], self._segments[row] = number, path_index, kept
        else:
            row = len(self._segments)
            self._owners.append(number)
            self._paths.append(path_index)
            self._segments.append(kept)
        self._by_segment_id.add(segment_id, row)
        self.segment_count += 1

    def add_segments_read(
        self,
        segment_ids: "array[int]",
        numbers: "array[int]",
        path_indexes: "array[int]",
        kept: Sequence[object],
    ) -> None:
        """As `add_segment`, for many segments in the order of their ids, behind all others.

        `order` tells their sizes.
        """
        rows = range(len(self._segments), len(self._segments) + len(kept))
        self._owners.extend(numbers)
        self._paths.extend(path_indexes)
        self._segments += kept
        self._by_segment_id.extend(segment_ids, array("I", rows))
        self.segment_count += len(kept)

    def timed(self, number: int, access_time_ns: int, expire_time_ns: int) -> None:
        """Note when the session was used last, and when it expires."""
        self._line(self._tenants[number]).add(access_time_ns, number)
        self._by_expiry.add(expire_time_ns, number)

    def order(self, by_use: dict[str, Line], by_expiry: Line, slot_bytes: "array[int]") -> None:
        """Set the sessions of each account by last use, all sessions by expiry, and the bytes of each."""
        self._by_use, self._by_expiry, self._slot_bytes = by_use, by_expiry, slot_bytes

    # -- looks -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """Numbers of the dormant sessions. Sessions may come and go meanwhile."""
        # Only the present sessions are listed: new ones must not keep the iteration going for ever.
        return (number for number in range(len(self._kept)) if self._kept[number] is not None)

    def accounts(self, among: Sequence[str] | None) -> list[str]:
        """The accounts among these, None for all, that have dormant sessions, or had."""
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
        return next((number for number in self._by_uid.numbers(_key(uid)) if self.uid(number) == uid), None)

    def lister(self, segment_id: int) -> int | None:
        """The number of the session that lists a segment."""
        row = self._row(segment_id)
        return None if row is None else self._owners[row]

    def slot_bytes(self, number: int) -> int:
        """Bytes of a session's slots."""
        return self._slot_bytes[number]

    def idle_s(self, number: int) -> float:
        """For how long nobody had used the session when it fell asleep."""
        return self._idle_s[number]

    def turn_count(self, number: int) -> int:
        """How many turns a session has had, as far as is known."""
        return self._turn_counts[number]

    def durable_bytes(self) -> Counter[str]:
        """Bytes of each tenant's slots."""
        by_tenant: Counter[str] = Counter()
        for tenant, names in self.names.items():
            by_tenant[tenant] = sum(self._slot_bytes[number] for number in names.values())
        return by_tenant

    def revived(self, number: int, use: TenantUse | None) -> Session:
        """A session as it would be if it were known, with its segments, which no session lists yet.

        The segments count in `use`; None: the session has no segments.
        """
        assert self._revive is not None  # noqa: S101  # it comes with them
        return self._revive(self.uid(number), self._kept[number], self.kept_segment, use)

    def kept(self, number: int) -> object:
        """The record of a session; None where no session has the number."""
        return self._kept[number]

    def kept_segment(self, segment_id: int) -> object:
        """The record of a segment. Raises KeyError(segment_id)."""
        row = self._row(segment_id)
        if row is None:
            raise KeyError(segment_id)
        return self._segments[row]

    @property
    def last_path(self) -> int:
        """The highest path number of any dormant segment so far, or 0."""
        return max(self._paths, default=0)

    def on_paths(self, paths: Collection[int]) -> Iterator[int]:
        """Sessions that have a segment on these paths. Sessions may come and go meanwhile."""
        for row in range(len(self._segments)):
            if self._paths[row] in paths and self._segments[row] is not None:
                yield self._owners[row]

    def coldest(self, account: str) -> int | None:
        """The session of the account that was used longest ago."""
        line = self._by_use.get(account)
        return None if line is None else line.first

    def due(self, now_ns: int, limit: int) -> list[int]:
        """At most so many sessions whose expiry has come."""
        due: list[int] = []
        for expire_time_ns, number in self._by_expiry:
            if expire_time_ns > now_ns or len(due) == limit:
                break
            due.append(number)
        return due

    # -- the way out ---------------------------------------------------------------------------------

    def left(
        self,
        number: int,
        session_id: str,
        access_time_ns: int,
        expire_time_ns: int,
        segment_ids: Iterable[int],
    ) -> None:
        """Make the session known; `segment_ids` were its dormant segments."""
        tenant = self._tenants[number]
        del self.names[tenant][session_id]
        self._by_uid.discard(_key(self.uid(number)), number)
        self._by_expiry.discard(expire_time_ns, number)
        self._line(tenant).discard(access_time_ns, number)
        self._kept[number] = None
        self._free.append(number)
        self.count -= 1
        for segment_id in segment_ids:
            row = self._row(segment_id)
            assert row is not None  # noqa: S101  # they are looked up once
            self._by_segment_id.discard(segment_id, row)
            self._segments[row] = None
            self._free_rows.append(row)
            self.segment_count -= 1

    def _line(self, tenant: str) -> Line:
        account = tenant if self._is_by_tenant else EVERYONE
        line = self._by_use.get(account)
        if line is None:
            line = self._by_use[account] = Line("q")
        return line

    def _row(self, segment_id: int) -> int | None:
        return next(self._by_segment_id.numbers(segment_id), None)


def _key(uid: bytes) -> int:
    return int.from_bytes(uid[:8], "big")
