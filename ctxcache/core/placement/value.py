"""Value: sessions leave in order of what keeping them promises per byte.

    value = returns per second kept x cost of a miss / bytes

The cost is in what is to be saved: turns, tokens or seconds. Returns per second are learned from return times
(`returns`); before there are any, those of public traces are taken (return_times.json, whose sources it
names; made by lab/studies/return_times.py). Hints replace them, as far as hints of their
kind came true. Sessions of least value leave first, from memory too, so that a session that will not return
is never written below. Worst case: a load whose classes say nothing; then idle time alone ranks.
"""

import enum
import json
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ctxcache.core.placement.look_ahead import Windowed
from ctxcache.core.placement.order import Accepts, Key, Keyed
from ctxcache.core.placement.policy import Capacities, Facts, Level
from ctxcache.core.placement.prices import BucketPrices
from ctxcache.core.placement.returns import WATCHED, ReturnTimes


class Objective(enum.Enum):
    """The quantity that hits are to save."""

    TURNS = "turns"
    """Turns that find their history: short histories first."""
    TOKENS = "tokens"
    """Tokens that need no prefill, whosever they are."""
    SECONDS = "seconds"
    """Time that callers wait: prefill, and something for each turn."""


BUCKET = BucketPrices()
"""How fast a bucket is, by default."""


@dataclass(frozen=True, slots=True)
class MissCost:
    """The cost of a miss, by its tokens.

    `prefill_tokens_per_s` is the engine's, measured; the default is LLaMA-13B's on one A100. `per_miss_s`,
    what is lost whatever the length, is a choice: a larger one favours turns, a smaller one tokens. Both are
    of SECONDS. `write_s_per_byte` is the wear of a byte written below, in seconds of prefill of the same
    price; 0 where wear costs nothing.
    """

    objective: Objective = Objective.SECONDS
    prefill_tokens_per_s: float = 7_000.0
    per_miss_s: float = 0.75
    write_s_per_byte: float = 0.0

    def is_worth_wear(self, chance: float, token_bytes: float) -> bool:
        """Whether to write what returns with that chance: what it saves is more than the wear of its bytes.

        What returned once returns with the same chance again, and is found each time: it saves
        chance / (1 - chance) times its prefill.
        """
        return chance >= (1 - chance) * token_bytes * self.write_s_per_byte * self.prefill_tokens_per_s

    def of(self, token_count: float) -> float:
        """The cost: 1 a turn, tokens, or seconds."""
        if self.objective is Objective.TURNS:
            return 1.0
        if self.objective is Objective.TOKENS:
            return token_count
        return self.per_miss_s + token_count / self.prefill_tokens_per_s

    def fetched(self, size_bytes: int) -> float:
        """The cost where so much comes back from a bucket; infinity where seconds are not what is saved."""
        if self.objective is not Objective.SECONDS:
            return math.inf
        return self.per_miss_s + BUCKET.fetch_s(size_bytes)


HINTS_REMEMBERED = 256
"""Counts are halved beyond so many hints."""
HINTS_BELIEVED = 8.0
"""As many true hints are taken to have come before the first."""


class Trust:
    """How far hints of one kind are believed: the share of recent ones that came true.

    Some dozen false hints end the belief.
    """

    def __init__(self) -> None:
        # An agent without history is believed at first: eight true hints are assumed.
        self._made, self._broken = HINTS_BELIEVED, 0.0

    @property
    def share(self) -> float:
        """The share of recent hints that came true."""
        return max(1 - self._broken / self._made, 0.0)

    def made(self) -> None:
        """A hint was given, or was seen to come true."""
        self._made += 1
        # Halved, not cut: the share stays, and what comes counts more.
        if self._made > HINTS_REMEMBERED:
            self._made, self._broken = self._made / 2, self._broken / 2

    def broke(self) -> None:
        """A hint that `made` counted did not come true."""
        self._broken += 1


# The forecast of a queue. A scheduler may be wrong about the order and right about which jobs wait, or the
# other way about. So each order has a trust of its own: does a job start before one that is picked from the
# queue? Jobs may start in the order that was said or in the order in which they came; the more trusted one is
# believed. O(log n) and a short move of memory a delta. Worst case: an order that turns false is believed for
# some dozen starts.

CHANCE = 0.2
"""How much better than by chance an order must be before it says anything."""
OVERTAKEN_BY = 8
"""So many jobs in a row that stood behind it start first: then a job is not where the order has it."""
INTERVAL_MEMORY = 64


class _Order:
    """One order of the jobs that wait, and how far it comes true."""

    def __init__(self) -> None:
        self._orders: dict[bytes, float] = {}
        self._places: list[float] = []
        self._trust = Trust()
        self._started: deque[float] = deque(maxlen=OVERTAKEN_BY)
        self._front = -math.inf

    @property
    def share(self) -> float:
        """How far the order is to be believed, 0 to 1."""
        # By chance half of the pairs are in order: a share of 1/2 says nothing and becomes 0.
        return max(2 * self._trust.share - 1 - CHANCE, 0.0) / (1 - CHANCE)

    def put(self, uid: bytes, order: float) -> None:
        """A job that did not wait does so now."""
        self._orders[uid] = order
        insort(self._places, order)

    def discard(self, uid: bytes) -> None:
        """A job that waited does so no longer."""
        del self._places[bisect_left(self._places, self._orders.pop(uid))]

    def started(self, uid: bytes, other: bytes) -> None:
        """A turn begins, while `other`, or none but itself, waits."""
        order = self._orders[uid]
        self._started.append(order)
        # The earliest place of the last few that started. Jobs that stand before it were overtaken by all of
        # these: the order does not know where they are.
        if len(self._started) == OVERTAKEN_BY:
            self._front = min(self._started)
        self._trust.made()
        # A fair test of an order: of two jobs that waited, the one that started must stand first. `other` is
        # picked without regard to either order.
        if self._orders[other] < order:
            self._trust.broke()

    def is_late(self, uid: bytes) -> bool:
        """Whether the job ought to have started."""
        return self._orders[uid] < self._front

    def before_count(self, uid: bytes) -> int:
        """How many jobs start before this one, without late jobs: when those start is not known."""
        return bisect_left(self._places, self._orders[uid]) - bisect_left(self._places, self._front)


class Forecast:
    """The queue by order. Owned by a policy."""

    def __init__(self) -> None:
        self._said, self._line = _Order(), _Order()
        self._come_count = 0
        self._uids: list[bytes] = []
        self.waiting: dict[bytes, int] = {}
        """Sessions whose jobs wait, with their places in `_uids`. To be looked at, not changed."""
        self._pick = 0
        self._started_s: float | None = None
        self._interval_s = 0.0

    def __len__(self) -> int:
        return len(self._uids)

    def __contains__(self, uid: bytes) -> bool:
        return uid in self.waiting

    @property
    def said_share(self) -> float:
        """How far the order that is said is to be believed, 0 to 1."""
        return self._said.share

    @property
    def share(self) -> float:
        """How far `wait_s` is to be believed, 0 to 1."""
        return max(self._said.share, self._line.share)

    def put(self, uid: bytes, order: float) -> None:
        """A job waits at `order`, wherever it waited before; it has come when it first did."""
        if uid in self.waiting:
            self._said.discard(uid)
        else:
            self._come_count += 1
            self._line.put(uid, self._come_count)
            self.waiting[uid] = len(self._uids)
            self._uids.append(uid)
        self._said.put(uid, order)

    def discard(self, uid: bytes) -> bool:
        """The job waits no longer. Whether it did."""
        number = self.waiting.pop(uid, None)
        if number is None:
            return False
        self._said.discard(uid)
        self._line.discard(uid)
        # The last one moves into the gap, so that a job is picked in one step.
        last = self._uids.pop()
        if last != uid:
            self._uids[number] = last
            self.waiting[last] = number
        return True

    def started(self, uid: bytes, now_s: float) -> None:
        """The turn of a job that waits begins; called before the job is discarded."""
        if self._started_s is not None:
            self._interval_s += (now_s - self._started_s - self._interval_s) / INTERVAL_MEMORY
        self._started_s = now_s
        # A generator of its own: the same events pick the same jobs in a store, a simulation and a test.
        self._pick = (self._pick * 1103515245 + 12345) & 0x7FFFFFFF
        other = self._uids[(self._pick >> 8) % len(self._uids)]
        self._said.started(uid, other)
        self._line.started(uid, other)

    def is_late(self, uid: bytes) -> bool:
        """Whether the job ought to have started."""
        return self._believed.is_late(uid)

    def wait_s(self, uid: bytes) -> float:
        """How long the job will wait if all before it come, at the late pace."""
        return self._interval_s * self._believed.before_count(uid)

    # The better one of two, decided anew at each look.
    @property
    def _believed(self) -> _Order:
        return self._said if self._said.share >= self._line.share else self._line


PREFETCHED_BELOW, PREFETCHED_ABOVE = 0.2, 0.4
"""Where trust in the queue's order falls so low that nothing is fetched by it, and where it is again."""
LEAST_WAIT_S = 1.0
TOLERANCE_S, TOLERANCE_SHARE = 10.0, 0.25
FETCH_BYTES_PER_S, FETCH_MARGIN_S = 0.5e9, 2.0
"""How fast two sessions are read at once from one SSD, and what the clock and the wait behind others take."""
SURE = 3.0
"""A session that is known to return counts so much more than one that may return."""


@cache
def public_return_times() -> dict[str, Any]:
    """Lessons of public traces. Raises FileNotFoundError where the package is not whole."""
    text = files("ctxcache.core.placement").joinpath("return_times.json").read_text()
    lessons: dict[str, Any] = json.loads(text)
    return lessons


def fetch_lead_s(size_bytes: int) -> float:
    """How long before its return a session of that size is to be fetched."""
    return FETCH_MARGIN_S + size_bytes / FETCH_BYTES_PER_S


MISS_COST = MissCost()


class ReturnValue(Windowed, ranks_holders=True):
    """Value per byte. Amortised O(log n) an event.

    `lessons` are return times to begin with, those of public traces by default.
    """

    def __init__(
        self,
        capacities: Capacities,
        miss_cost: MissCost = MISS_COST,
        lessons: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(capacities)
        self._miss_cost = miss_cost
        self._worth: dict[bytes, float] = {}
        """Cost of a miss per byte."""
        self._token_bytes: dict[bytes, float] = {}
        """Bytes of a token, where wear is weighed."""
        self._returns = ReturnTimes(self._rank)
        self._returns.recount(public_return_times() if lessons is None else lessons, math.inf)
        self._queue = Forecast()
        self._follows_order = True
        self._waits = Trust()
        self._due = Keyed()
        """Sessions with an announced return that was not fetched for yet, by when that fetch is to begin."""

    @property
    def follows_order(self) -> bool:
        """See Windowed. The order is false at times."""
        return self._follows_order

    def arrived(self, uid: bytes, now_s: float) -> None:
        """See Policy."""
        self._returns.began(uid, now_s)
        if self._expected:
            self._judge_promise(uid, now_s)
        if uid in self._queue.waiting:
            self._queue.started(uid, now_s)
            share = self._queue.said_share
            # Two thresholds: a share that moves around one would switch fetching on and off with each job.
            self._follows_order = share > (PREFETCHED_BELOW if self._follows_order else PREFETCHED_ABOVE)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        self._returns.idle(uid, facts, now_s)
        self._weigh(uid, facts)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float, *, is_watched: bool = True) -> None:
        """See Policy. A session that is not watched is taken to be away for longer than is learned."""
        if is_watched:
            self._returns.recalled(uid, idle_s)
        self._weigh(uid, facts, -idle_s)

    def resized(self, uid: bytes, facts: Facts) -> None:
        """See Policy."""
        self._weigh(uid, facts, self._last_use.get(uid))

    def lessons(self) -> dict[str, object]:
        """See Policy: return times. Trust in a hint's sender is learned anew within some dozen hints."""
        return self._returns.counts()

    def relearn(self, lessons: Mapping[str, Any], age_s: float) -> None:
        """See Policy."""
        self._returns.recount(lessons, age_s)

    def passed(self, now_s: float) -> None:
        """See Policy."""
        self._returns.advance(now_s)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._worth.pop(uid, None)
        self._token_bytes.pop(uid, None)
        # The return times go on watching the session: whether its job comes is learned all the same.
        # Its worth went with its size, and comes anew with its next turn.
        self._queue.discard(uid)
        self._fetched.discard(uid)
        self._due.discard(uid)

    def chance(self, uid: bytes) -> float:
        """See Policy. 0 for one that is not known."""
        return self._returns.chance(uid)

    def is_worth_wear(self, uid: bytes) -> bool:
        """See Policy. A return that was said, or a job that waits, is as good as certain."""
        token_bytes = self._token_bytes.get(uid)
        if token_bytes is None or uid in self._expected or uid in self._queue.waiting:
            return True
        return self._miss_cost.is_worth_wear(self._returns.chance(uid), token_bytes)

    def backed(self, uid: bytes) -> None:
        """See Policy. Until it has another size."""
        size_bytes = self._sizes.get(uid)
        if size_bytes is not None:
            self._worth[uid] = min(self._worth[uid], self._miss_cost.fetched(size_bytes) / size_bytes)
            self._rank(uid)

    def continued(self, uid: bytes) -> None:
        """See Policy."""
        self._returns.continued(uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        self._expected.pop(uid, None)
        self._returns.ended(uid)
        self.evicted(uid)

    def hinted(self, uid: bytes, order: float) -> None:
        """See Policy. Ignores sessions that are not held: the live store never forwards hints about them."""
        if uid not in self._held:
            return
        self._queue.put(uid, order)
        self._returns.queued(uid)
        self._resize()
        self._fetched.put(uid, order)
        self._rank(uid)

    def withdrawn(self, uid: bytes) -> None:
        """See Policy."""
        if self._queue.discard(uid):
            self._fetched.discard(uid)
            self._returns.unqueued(uid)
            self._rank(uid)

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """See Policy."""
        if uid not in self._held:
            return
        self._expected.pop(uid, None)
        self._due.discard(uid)
        self._returns.said(uid, is_over=return_s is None)
        if return_s is not None:
            self._expected[uid] = (self._returns.now_s, return_s)
            # By when the fetch has to begin, not by when it returns: a large session comes first.
            self._due.put(uid, (return_s - fetch_lead_s(self._sizes[uid]),))
        if len(self._expected) > WATCHED:
            self._due.discard(self._expected.popitem(last=False)[0])
        self._rank(uid)

    def _returning(self, accepts: Accepts) -> bytes | None:
        """See Windowed. It is fetched once, when it is time, while such hints come true."""
        # Hints that do not come true fetch nothing.
        if self._waits.share < PREFETCHED_ABOVE:
            return None
        # The filter lets through what is not due yet, so that the search ends at the first that is not.
        uid = self._due.first(lambda each: not self._is_due(each) or self._is_void(each) or accepts(each))
        while uid is not None and self._is_due(uid):
            if not self._is_void(uid):
                return uid
            self._due.discard(uid)
            uid = self._due.first(lambda each: not self._is_due(each) or self._is_void(each) or accepts(each))
        return None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:
        """See Policy. Nor is one pushed out that is due to return, for one that returns later."""
        if super().is_needed_soon(uid, fetched):
            # The nearer return has memory.
            return True
        mine, other = self._expected.get(uid), self._expected.get(fetched)
        if mine is None or self._waits.share < PREFETCHED_ABOVE:
            return False
        said_s, return_s = mine
        now_s = self._returns.now_s
        is_near = return_s - fetch_lead_s(self._sizes.get(uid, 0)) <= now_s
        is_late = now_s > return_s + _tolerance_s(said_s, return_s)
        return is_near and not is_late and (other is None or return_s <= other[1])

    def _is_due(self, uid: bytes) -> bool:
        key = self._due.keys.get(uid)
        return key is not None and key[0] <= self._returns.now_s

    def _is_void(self, uid: bytes) -> bool:
        """Whether there is nothing to fetch: it is in memory, or has not come when it was said to."""
        promise = self._expected.get(uid)
        if promise is None or self._held.get(uid) is not Level.BELOW:
            return True
        return self._returns.now_s > promise[1] + _tolerance_s(*promise)

    def _weigh(self, uid: bytes, facts: Facts, last_use: float | None = None) -> None:
        size_bytes = facts.size_bytes or 1
        if self._sizes.get(uid) != size_bytes:
            # A miss costs by tokens, and a session's tokens by its size: computed again only when it changes.
            self._worth[uid] = self._miss_cost.of(size_bytes / facts.token_bytes) / size_bytes
        if self._miss_cost.write_s_per_byte:
            self._token_bytes[uid] = facts.token_bytes
        self._measure(uid, size_bytes, last_use)
        self._rank(uid)

    # In the usual case neither a hint nor a job is looked up.
    def _key(self, uid: bytes) -> Key:
        if self._expected or uid in self._queue.waiting:
            index_per_s = self._index_per_s(uid)
        else:
            index_per_s = self._returns.index_per_s(uid)
        # The least recently used of equals leaves first, not the one whose name comes first.
        return (index_per_s * self._worth[uid], self._last_use[uid])

    def _index_per_s(self, uid: bytes) -> float:
        learned = self._returns.index_per_s(uid)
        if uid in self._queue.waiting:
            return self._queued_index_per_s(uid, learned)
        promise = self._expected.get(uid) if self._expected else None
        if promise is None:
            return learned
        said_s, return_s = promise
        now_s, share = self._returns.now_s, self._waits.share
        # Late by more than the tolerance: the promise is not believed any more, though nobody took it back.
        if now_s > return_s + _tolerance_s(said_s, return_s):
            return learned
        # A mixture: as far as promises come true, the nearness of the return; for the rest what its class
        # does.
        return share * SURE / max(return_s - now_s, LEAST_WAIT_S) + (1 - share) * learned

    def _queued_index_per_s(self, uid: bytes, learned: float) -> float:
        share = self._queue.share
        # Late, or an order that says nothing: known to return, and that is all.
        if not share or self._queue.is_late(uid):
            return SURE * learned
        wait_s = self._queue.wait_s(uid) * self._returns.coming_share
        by_order = self._returns.chance(uid) / max(wait_s, LEAST_WAIT_S)
        return SURE * (share * by_order + (1 - share) * learned)

    def _judge_promise(self, uid: bytes, now_s: float) -> None:
        promise = self._expected.pop(uid, None)
        if promise is None:
            return
        self._due.discard(uid)
        said_s, return_s = promise
        self._waits.made()
        # Early is as wrong as late: memory was kept for the wrong time.
        if abs(now_s - return_s) > _tolerance_s(said_s, return_s):
            self._waits.broke()


def _tolerance_s(said_s: float, return_s: float) -> float:
    return max(TOLERANCE_S, TOLERANCE_SHARE * (return_s - said_s))
