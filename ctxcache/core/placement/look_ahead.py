"""Look-ahead: the head of the scheduler's queue is fetched, and its sessions leave last.

    no job                 queue's tail ........ | window's end ........ head
    leaves first, by LRU   leaves next, from its tail   fetched, leaves last

Source: CachedAttention, ATC'24, section 3.3. The prefetch window is Cmem/Skv jobs, Skv the average size of a
held session. The paper's eviction window does not say which session outside it leaves first. Here sessions
without a job leave first, the least recently used before the others, then the queue from its tail. Without a
queue the order is LRU. Amortised O(log n) an event. Worst case: a false order; `follows_order` then stops
prefetches.
"""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from ctxcache.core.placement.order import SLACK, Accepts, Key, Keyed
from ctxcache.core.placement.policy import Capacities, Facts, Level, Ranked


# A moving border in two heaps:
#
#     _outside (lowest first)   ──► joins while it is earlier than the last inside, or there is room
#     _tail (highest first)     ──► leaves while there are more inside than `_length`
class Window:
    """The first `length` jobs of a queue. Calls `changed` for every session that enters or leaves.

    O(log n).
    """

    def __init__(self, changed: Callable[[bytes], None]) -> None:
        self._changed = changed
        self._length = 1
        self._orders: dict[bytes, float] = {}
        self._inside: set[bytes] = set()
        self._tail: list[tuple[float, bytes]] = []
        self._outside = Keyed()

    def __contains__(self, uid: bytes) -> bool:
        return uid in self._inside

    def __len__(self) -> int:
        return len(self._inside)

    def order(self, uid: bytes) -> float:
        """When the session's job starts, relative to the other jobs."""
        return self._orders[uid]

    @property
    def uids(self) -> frozenset[bytes]:
        """The sessions in the window."""
        return frozenset(self._inside)

    def put(self, uid: bytes, order: float) -> None:
        """A job waits at `order`, wherever it waited before."""
        self.discard(uid)
        self._orders[uid] = order
        self._outside.put(uid, (order,))
        self._settle()

    def discard(self, uid: bytes) -> None:
        """The job waits no longer."""
        if self._orders.pop(uid, None) is None:
            return
        self._outside.discard(uid)
        if uid in self._inside:
            self._inside.discard(uid)
            self._changed(uid)
        self._settle()

    def resize(self, length: int) -> None:
        """Let the window be so long, at least one job."""
        length = max(length, 1)
        if length != self._length:
            self._length = length
            self._settle()

    def _settle(self) -> None:
        """Move the border until the window has the earliest jobs and is as long as it may be."""
        while (uid := self._outside.first()) is not None:
            # The earliest outside is not earlier than the last inside: the border is right.
            if len(self._inside) >= self._length and self._orders[uid] >= self._last()[0]:
                break
            self._outside.discard(uid)
            self._inside.add(uid)
            heappush(self._tail, (-self._orders[uid], uid))
            self._changed(uid)
            self._shrink()
        self._shrink()
        if len(self._tail) > 2 * len(self._inside) + SLACK:
            self._tail = [(-self._orders[uid], uid) for uid in self._inside]
            heapify(self._tail)

    def _shrink(self) -> None:
        while len(self._inside) > self._length:
            order, uid = self._last()
            heappop(self._tail)
            self._inside.discard(uid)
            self._outside.put(uid, (order,))
            self._changed(uid)

    def _last(self) -> tuple[float, bytes]:
        while True:
            # Entries of jobs that left, or moved, are dropped when they come up.
            order, uid = -self._tail[0][0], self._tail[0][1]
            if uid in self._inside and self._orders[uid] == order:
                return order, uid
            heappop(self._tail)


class Windowed(Ranked, ranks_holders=True):
    """Policies that rank held sessions and fetch the head of a queue.

    Subclasses give a session's `_key`, call `_measure` before it is placed, and put jobs into `_fetched`.
    """

    def __init__(self, capacities: Capacities) -> None:
        super().__init__()
        self._capacities = capacities
        self._ranks: dict[bytes, Key] = {}
        """Ranks of held sessions, as last told or asked for."""
        self._fetchable = Keyed()
        self._held: dict[bytes, Level] = {}
        self._held_bytes = 0
        self._sizes: dict[bytes, int] = {}
        self._last_use: dict[bytes, float] = {}
        self._use_count = 0
        self._fetched = Window(self._rank_fetch)
        self._expected: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """By session, when its client announced a return, and for when. Empty in policies that ignore this.

        An entry stays past the eviction: the return shows whether the client was right.
        """

    @property
    def follows_order(self) -> bool:
        """Whether sessions are fetched in the queue's order."""
        return True

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        if uid not in self._held:
            # A size is known before a place: `_measure` comes first.
            self._held_bytes += self._sizes[uid]
        self._held[uid] = tier
        self._resize()
        self._rank(uid)
        self._rank_fetch(uid)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        if self._held.pop(uid, None) is not None:
            self._held_bytes -= self._sizes[uid]
        self._sizes.pop(uid, None)
        self._last_use.pop(uid, None)
        self._ranks.pop(uid, None)
        self._fetchable.discard(uid)

    def slept(self, uid: bytes) -> float:
        """See Policy."""
        last_use = self._last_use.get(uid, 0.0)
        super().slept(uid)
        return -last_use

    def prefetch(self, accepts: Accepts = lambda _: True) -> bytes | None:
        """See Policy."""
        # The head of the queue first. Returns that were announced are fetched only where no job waits for a
        # fetch.
        found = self._fetchable.first(accepts) if self._fetchable.keys and self.follows_order else None
        return self._returning(accepts) if found is None and self._expected else found

    def _returning(self, accepts: Accepts) -> bytes | None:  # noqa: ARG002  not every policy listens
        """The session to fetch, since its client announced its return."""
        return None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """See Policy. The session whose job starts later gives way: memory may hold fewer than the window."""
        if not self.follows_order or uid not in self._fetched:
            return False
        # Both in the window, and memory may hold only one: the earlier job has it.
        return fetched not in self._fetched or self._fetched.order(uid) <= self._fetched.order(fetched)

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        if uid not in self._sizes:
            return None
        key, known = self._key(uid), self._ranks.get(uid)
        if known is None:
            return key
        # A rank that rose is noted here. A rank that fell counts once `_rank` has told of it.
        if key > known:
            self._ranks[uid] = key
        return max(key, known)

    def _key(self, uid: bytes) -> Key:
        """Where a session that was measured stands: the lowest leaves first."""
        raise NotImplementedError

    def _measure(self, uid: bytes, size_bytes: int, last_use: float | None = None) -> None:
        """A turn of the session is over, and it has that size.

        `last_use`: its number in place of the next; below 0 where it was before all that are counted.
        """
        self._use_count += 1
        self._last_use[uid] = self._use_count if last_use is None else last_use
        if uid in self._held:
            self._held_bytes += size_bytes - self._sizes[uid]
        self._sizes[uid] = size_bytes

    @property
    def _average_bytes(self) -> int:
        return max(self._held_bytes // max(len(self._held), 1), 1)

    def _resize(self) -> None:
        self._fetched.resize(self._capacities.memory_bytes // self._average_bytes)

    def _rank(self, uid: bytes) -> None:
        if uid not in self._held:
            return
        key, before = self._key(uid), self._ranks.get(uid)
        self._ranks[uid] = key
        # Only a fall is told; see Ranked.
        if before is None or key < before:
            self._fallen(uid)

    def _rank_fetch(self, uid: bytes) -> None:
        if uid in self._fetched and self._held.get(uid) is Level.BELOW:
            self._fetchable.put(uid, (self._fetched.order(uid),))
        elif uid in self._fetchable.keys:
            self._fetchable.discard(uid)


class LookAhead(Windowed, ranks_holders=True):
    """The paper's policy. A subclass ranks sessions without a job by another `score`."""

    def __init__(self, capacities: Capacities) -> None:
        super().__init__(capacities)
        self._queue: dict[bytes, float] = {}

    def score(self, uid: bytes) -> float:
        """Where a session stands that has no job in the queue: the lowest leaves first."""
        return self._last_use[uid]

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:  # noqa: ARG002
        """See Policy."""
        self._measure(uid, facts.size_bytes)
        self._resize()
        self._rank(uid)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float, *, is_watched: bool = True) -> None:  # noqa: ARG002
        """See Policy."""
        self._measure(uid, facts.size_bytes, -idle_s)
        self._resize()
        self._rank(uid)

    def resized(self, uid: bytes, facts: Facts) -> None:
        """See Policy. The order is the same, but the window may hold another number of jobs."""
        self._measure(uid, facts.size_bytes, self._last_use.get(uid))
        self._resize()

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self.evicted(uid)
        self.withdrawn(uid)

    def hinted(self, uid: bytes, order: float) -> None:
        """See Policy."""
        self._queue[uid] = order
        self._fetched.put(uid, order)
        self._rank(uid)

    def withdrawn(self, uid: bytes) -> None:
        """See Policy."""
        if self._queue.pop(uid, None) is not None:
            self._fetched.discard(uid)
            self._rank(uid)

    def _key(self, uid: bytes) -> Key:
        order = self._queue.get(uid)
        # The least recently used of equals leaves first, not the one whose name comes first.
        return (0, self.score(uid), self._last_use[uid]) if order is None else (1, -order)


class Belady(LookAhead, ranks_holders=False):
    """Evicts the session that is needed last: the bound of policies that look at time alone.

    Belady knows the future, so only the simulator has it. A policy that looks at sizes too may hit more
    often.

    `next_use_s` says when a session is needed next, infinity for never, as of its last turn.
    """

    def __init__(self, capacities: Capacities, next_use_s: Callable[[bytes], float]) -> None:
        super().__init__(capacities)
        self._next_use_s = next_use_s

    def score(self, uid: bytes) -> float:
        """See LookAhead."""
        return -self._next_use_s(uid)
