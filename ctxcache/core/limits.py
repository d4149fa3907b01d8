"""Limits: how much of everything the cache takes on at a time. Watermarks: how full the arena is kept.

Budgets: how many bytes may be pinned, and which request gets the next free bytes. A segment that several
clients pin counts once in all, and once for each client: a hundred readers of one prefix pin no more than one
does. A segment belongs to one tenant. Cost: two dictionary entries per segment and client.

Facts and comparisons only. `cache/` asks them, acts and waits.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.core.placement.shares import Shares
from ctxcache.errors import TooManyRequests

SECOND_NS = 10**9
OWN_PER_FREE = 2
"""A tenant may have at most so many times what it leaves free.

Alone 2/3 of all, N at a time 2/(2N+1) each.
"""


@dataclass(frozen=True, slots=True)
class Bound:
    """The most there may be of something at a time.

    `is_divided`: no tenant may take so many that none is left.
    """

    limit: int
    is_divided: bool = False

    def is_reached(self, taken: int, own: int) -> bool:
        """Whether one more is too many for a tenant that has `own` of the `taken`."""
        # Divided: own < 2 x free. One tenant stops at two thirds and leaves a third; two stop at two fifths
        # each. No tenant has to be known in advance, and no count has to be configured per tenant.
        free = self.limit - taken
        return free <= 0 or (self.is_divided and own >= OWN_PER_FREE * free)


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, and shares of the arena in (0, 1].

    Requests beyond a limit are refused, with a delay to retry after.

    `model_stream_count`: streams of all models together; each takes some hundred bytes. `lease_share`,
    `reservation_share`: of the arena's bytes that all readers, or all writers, may keep from being evicted;
    `client_share`: that one local client may, as a reader and again as a writer. `fragment_count`: runs of
    tokens that truncation may leave of one session; a refused caller need not try again. `retention_share`:
    of the tier below that may be retained on request, `pin_share`: of the arena that may be kept there so,
    both for `retention_ns` at most and divided among tenants by their shares. `room_wait_ns`: how long a
    caller waits for others to let go before it is refused. `scrub_bytes_per_s`: how fast all is verified
    unasked. `are_divided`: whether one tenant's counts are bound to leave some for others.
    """

    session_count: int = 1 << 20
    model_count: int = 1 << 12
    model_stream_count: int = 1 << 18
    lease_count: int = 1 << 16
    fragment_count: int = 1 << 12
    lease_share: float = 0.75
    reservation_share: float = 0.75
    client_share: float = 0.5
    retention_share: float = 0.25
    pin_share: float = 0.25
    retention_ns: int = 3600 * SECOND_NS
    room_wait_ns: int = SECOND_NS // 4
    scrub_bytes_per_s: int = 0
    are_divided: bool = False

    def bound(self, limit: int) -> Bound:
        """One of the counts, as it is to be kept."""
        return Bound(limit, self.are_divided)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Engines that publish their queue, jobs of each, and how long those stay when its stream breaks."""

    engine_count: int = 64
    job_count: int = 4096
    grace_ns: int = 10 * SECOND_NS
    are_divided: bool = False


DEFAULT_LIMITS = Limits()
DEFAULT_QUEUE_LIMITS = QueueLimits()


# Watermarks. Shares are of the arena. `free`: bytes of no segment. `dirty`: bytes that only memory has.
# `claimed`: bytes that are dirty, or that a writer may make dirty without asking again.


# The arena by what is in it, and who acts at which mark:
#
#     0                       dirty 1/4             dirty_limit 3/4        high 7/8   low 15/16   full
#     |──── dirty: memory alone ──┼──────────────────────┼───────────────────┼──────────┼──────────|
#                                 │ write-behind runs    │ writers wait      │          │
#                                 │ at once              │                   └── keep_free drops ◄┘
#                                                                                down to here
#
# Between `low` and `high` nothing is done: each drop would be followed by the next allocation.
@dataclass(frozen=True, slots=True)
class Watermarks:
    """The bounds between which the arena is kept.

    Once less than `low` is free, clean segments leave until `high` is. Above `dirty` rows are written behind
    at once, tails too; above `dirty_limit` writers wait, `writer_wait_s` at most, and so long does whoever
    needs room that has to be written first. A tail is written `tail_age_ns` after its first row that is not
    (0: never because of its age). `write_behind_bytes_per_s`: see Allowance. No segment of more than 64
    tokens takes more than `longest` of the arena, or of an SSD path: room for it must lie in one piece.
    """

    low: float = 1 / 16
    high: float = 1 / 8
    dirty: float = 0.25
    dirty_limit: float = 0.75
    tail_age_ns: int = 30 * SECOND_NS
    write_behind_bytes_per_s: int = 0
    writer_wait_s: float = 5
    longest: float = 1 / 64

    def is_low(self, free_bytes: int, capacity_bytes: int) -> bool:
        """Whether so little is free that clean segments have to leave."""
        return free_bytes < self.low * capacity_bytes

    def filled_bytes(self, capacity_bytes: int) -> int:
        """The bytes that segments may take while the wanted share stays free."""
        return capacity_bytes - int(self.high * capacity_bytes)

    def missing_bytes(self, free_bytes: int, capacity_bytes: int) -> int:
        """The bytes that have to leave until enough is free again; not positive when enough is."""
        return int(self.high * capacity_bytes) - free_bytes

    def excess_dirty_bytes(self, dirty_bytes: int, capacity_bytes: int) -> int:
        """The bytes that have to be written at once; not positive when nothing has to."""
        return dirty_bytes - int(self.dirty * capacity_bytes)

    def limit_bytes(self, capacity_bytes: int) -> int:
        """The most that may be claimed."""
        return int(self.dirty_limit * capacity_bytes)

    def admits(self, needed_bytes: int, claimed_bytes: int, own_bytes: int, capacity_bytes: int) -> bool:
        """Whether a writer may claim so much more.

        A request larger than the bound is let through when it is alone.

        `own_bytes` of `claimed_bytes` are the writer's own.
        """
        # A writer alone may have more than the bound: otherwise a session larger than the bound could never
        # grow.
        is_alone = claimed_bytes <= own_bytes
        return is_alone or claimed_bytes + needed_bytes <= self.limit_bytes(capacity_bytes)


DEFAULT_WATERMARKS = Watermarks()


class Allowance:
    """How many bytes may be written behind: so many per second, saved up for one second at most.

    Something is written whole or not at all, so what is spent may be more than there is; then nothing
    is written until it is made up for. 0 bytes per second: no bound.
    """

    def __init__(self, bytes_per_s: int, now_ns: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._balance_bytes = float(bytes_per_s)
        self._then_ns = now_ns

    def is_left(self, now_ns: int) -> bool:
        """Whether anything may be written now."""
        # Some ask at a moment that they looked at the clock before others did.
        earned = max(now_ns - self._then_ns, 0) * self.bytes_per_s / SECOND_NS
        # At most one second's worth: a pause must not be followed by a burst that a device's life pays for.
        self._balance_bytes = min(self._balance_bytes + earned, self.bytes_per_s)
        self._then_ns = max(now_ns, self._then_ns)
        return not self.bytes_per_s or self._balance_bytes > 0

    def spend(self, size_bytes: int) -> None:
        """So much is written."""
        self._balance_bytes -= size_bytes


PINNED_PER_FREE = 1
"""A tenant may pin at most so many times what it leaves free: its readers and writers together leave some."""


class Pinner(NamedTuple):
    """A client that pins. `number` None: the server itself, which no client's share binds."""

    tenant: str
    number: int | None = None


# Pins of one segment, counted three times:
#
#     _pins          segment ► how many pin it             in all: the bytes count once
#     _client_pins   client ► segment ► how many           for the client's share: once per client
#     _tenant_bytes  tenant ► bytes                        for the division among tenants
class Budget:
    """Pinned segments by id, with their sizes. Owned by the event loop."""

    def __init__(self, *, limit_bytes: int, client_limit_bytes: int, is_divided: bool = False) -> None:
        """`is_divided`: no tenant may pin so much that nothing is left for others."""
        self.limit_bytes = limit_bytes
        self.is_divided = is_divided
        self._tenant_bytes: Counter[str] = Counter()
        self.client_limit_bytes = min(client_limit_bytes, limit_bytes)
        self.used_bytes = 0
        # Plain dicts: a Counter deletes by a call of Python, once per segment of a lease.
        self._pins: dict[int, int] = {}
        self._client_pins: dict[Pinner, dict[int, int]] = {}
        self._client_bytes: Counter[Pinner] = Counter()

    def limit_of(self, client: Pinner) -> int:
        """The most bytes that the client could ever pin."""
        # own <= 1 x free: alone a tenant has half of the budget at most.
        # Alone it may have so much that what is left free is in proportion.
        limit_bytes = self.limit_bytes
        if self.is_divided:
            limit_bytes = limit_bytes * PINNED_PER_FREE // (PINNED_PER_FREE + 1)
        return limit_bytes if client.number is None else min(limit_bytes, self.client_limit_bytes)

    def used_by(self, client: Pinner) -> int:
        """Bytes that the client pins; for the server itself all that are pinned."""
        return self.used_bytes if client.number is None else self._client_bytes[client]

    def pinned_by(self, client: Pinner) -> Collection[int]:
        """Ids of what the client pins; for the server itself all that are pinned. To be looked at."""
        return self._pins if client.number is None else self._client_pins.get(client, {})

    def fits(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> bool:
        """Whether these may be pinned now, by segment id. Pinned segments need no room."""
        # Segments that anybody pins already take no room again: a hundred readers of one prompt pin it once.
        new_bytes = _bytes_but(sizes_bytes, self._pins)
        free_bytes = self.limit_bytes - self.used_bytes - new_bytes
        if free_bytes < 0:
            return False
        own_bytes = self._tenant_bytes[client.tenant] + new_bytes
        if self.is_divided and new_bytes and own_bytes > PINNED_PER_FREE * free_bytes:
            return False
        if client.number is None:
            return True
        own_bytes = self._client_bytes[client] + _bytes_but(sizes_bytes, self._client_pins.get(client, {}))
        return own_bytes <= self.client_limit_bytes

    def pin(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> None:
        """Count these as pinned once more."""
        new_bytes = _count_up(self._pins, sizes_bytes)
        self.used_bytes += new_bytes
        self._tenant_bytes[client.tenant] += new_bytes
        if client.number is not None and sizes_bytes:
            own = self._client_pins.setdefault(client, {})
            self._client_bytes[client] += _count_up(own, sizes_bytes)

    def unpin(self, client: Pinner, sizes_bytes: Mapping[int, int]) -> None:
        """Take back one `pin` of these."""
        freed_bytes = _count_down(self._pins, sizes_bytes)
        self.used_bytes -= freed_bytes
        self._tenant_bytes[client.tenant] -= freed_bytes
        if not self._tenant_bytes[client.tenant]:
            del self._tenant_bytes[client.tenant]
        if client.number is not None and sizes_bytes:
            own = self._client_pins[client]
            self._client_bytes[client] -= _count_down(own, sizes_bytes)
            if not own:
                del self._client_pins[client], self._client_bytes[client]

    def pinned(self) -> Collection[int]:
        """Ids of what is pinned."""
        return self._pins.keys()


def _bytes_but(sizes_bytes: Mapping[int, int], pins: Collection[int]) -> int:
    """Bytes of those that are not among the pins."""
    if not pins:
        return sum(sizes_bytes.values())
    return sum([size_bytes for segment_id, size_bytes in sizes_bytes.items() if segment_id not in pins])


def _count_up(pins: dict[int, int], sizes_bytes: Mapping[int, int]) -> int:
    """One pin of each more; bytes of those that had none."""
    new_bytes = 0
    for segment_id, size_bytes in sizes_bytes.items():
        count = pins.get(segment_id, 0)
        pins[segment_id] = count + 1
        if not count:
            new_bytes += size_bytes
    return new_bytes


def _count_down(pins: dict[int, int], sizes_bytes: Mapping[int, int]) -> int:
    """One pin of each less; bytes of those that have none any more."""
    freed_bytes = 0
    for segment_id, size_bytes in sizes_bytes.items():
        count = pins[segment_id]
        if count > 1:
            pins[segment_id] = count - 1
        else:
            del pins[segment_id]
            freed_bytes += size_bytes
    return freed_bytes


# The waiting line. Requests of one tenant are served in the order of coming: small requests never keep a
# large one from its room. A tenant whose next request leaves the tenant within its share goes before every
# other tenant. Tenants within their shares take turns by the order of coming; of the others the one that is
# least above its share goes first. Shares are those of `Shares`, of the tenants that have something or wait.
#
# Worst case: a request above its tenant's share waits for as long as other tenants are within theirs.
# Meanwhile its tenant gets nothing and what the tenant has is written, so that the tenant comes to be within
# its share as well.
#
# The order of service, with a budget of 100 and two tenants, 50 each:
#
#     a has 60, asks 10 (number 1)     above its share by 20
#     b has 20, asks 10 (number 2)     within its share          ► b first
#     both within                                                ► lower number first
#     both above                                                 ► the one less above first

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
        # Tenants that only wait count as present: shares are divided among those that have something or want
        # it.
        there_bytes = dict.fromkeys(self._waiting, 0) | dict(self._used_bytes)

        def place(request: RoomRequest) -> tuple[bool, int, int]:
            own_bytes = self._shares.guaranteed_bytes(request.account, there_bytes, capacity_bytes)
            above_bytes = there_bytes[request.account] - own_bytes
            is_above = above_bytes + request.needed_bytes > 0
            return is_above, above_bytes if is_above else 0, request.number

        return min(candidates, key=place)
