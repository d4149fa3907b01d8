"""One replay: a trace, a policy and a load on a virtual clock. The policy code is that of `core.placement`.

Without slots a turn takes no time. With them turns wait in a queue, first come first served, that the policy
sees; a turn keeps its slot for prefill (of what is missing, too), SSD reads and decoding, and a session's
next turn comes no earlier than the last one ends. One SSD reads, turns before prefetches.
Memory: live sessions, those that waited less than the TTL. Not modelled: slow writes, writes that delay reads.
"""

import math
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ctxcache.core.placement.inclusive import InclusiveLedger
from ctxcache.core.placement.ledger import Act, Ledger
from ctxcache.core.placement.policy import Capacities, Facts, Policy, Tier
from ctxcache.simulate.load import NEVER_S, Hint, Load
from ctxcache.simulate.tally import Tally
from ctxcache.simulate.trace import Turn

NextUse = Callable[[bytes], float]
"""When a session is needed next, in seconds of the trace."""
MakePolicy = Callable[[Capacities, NextUse], Policy]
STEP_TURNS = 1024
"""Turns between two calls of `step`."""


@dataclass(slots=True)
class _Live:
    """A session between its first turn and its end. `waiting` are turns that came before the last was over."""

    turn_count: int = 0
    size_tokens: int = 0
    counted_tokens: int = 0
    next_s: float = NEVER_S
    is_busy: bool = False
    waiting: deque[tuple[Turn, float]] = field(default_factory=deque)


class Replay:
    """Plays turns; `run` once. `next_arrivals_s` is `future.look`'s, None where nothing needs the future."""

    def __init__(
        self, load: Load, make_policy: MakePolicy, *, next_arrivals_s: "array[float] | None" = None
    ) -> None:
        self._load = load
        capacities = Capacities(load.dram_bytes, load.ssd_bytes)
        policy = make_policy(capacities, self._next_use_s)
        make_ledger = InclusiveLedger if load.is_inclusive else Ledger
        self.ledger = make_ledger(capacities, policy, buffer_bytes=int(load.dram_bytes * load.buffer_share))
        self.tally = Tally()
        self._live_tokens = self.peak_live_tokens = 0
        """State that a later turn needs, held or not; counted where the future is known."""
        self._next_arrivals_s = next_arrivals_s
        self._live: dict[bytes, _Live] = {}
        self._idle: OrderedDict[bytes, float] = OrderedDict()
        self._queue: deque[tuple[Turn, float, float]] = deque()
        self._free_slots = load.slot_count or 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_count = 0
        self._ready_s: dict[bytes, float] = {}
        """When those prefetched are, or were, in DRAM."""
        self._reader_free_s = 0.0
        self._is_awaited = False

    def run(self, turns: Iterable[Turn], step: Callable[[int], None] = lambda _: None) -> Tally:
        """Play all turns to their ends. `step` hears how many have arrived, now and then."""
        index = 0
        for index, turn in enumerate(turns, 1):
            self._until(turn.arrival_s)
            self._arrive(turn, self._next_arrivals_s[index - 1] if self._next_arrivals_s else NEVER_S)
            if index % STEP_TURNS == 0:
                step(index)
            if index == self._load.warm_up_count:
                self.tally = Tally(begin_s=turn.arrival_s, end_s=turn.arrival_s)
        self._until(math.inf)
        step(index)
        return self.tally

    def _next_use_s(self, uid: bytes) -> float:
        live = self._live.get(uid)
        return live.next_s if live else NEVER_S

    def _until(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            due_s, _, event = heappop(self._events)
            event(due_s)
        while self._idle and now_s < math.inf:
            uid, since_s = next(iter(self._idle.items()))
            if since_s + self._load.ttl_s > now_s:
                return
            del self._idle[uid]
            self._expire(uid)

    def _expire(self, uid: bytes) -> None:
        self._live_tokens -= self._live.pop(uid).counted_tokens
        self._ready_s.pop(uid, None)
        self.ledger.ended(uid)

    def _at(self, due_s: float, event: Callable[[float], None]) -> None:
        self._event_count += 1
        heappush(self._events, (due_s, self._event_count, event))

    def _arrive(self, turn: Turn, next_s: float) -> None:
        live = self._live.get(turn.session)
        if live is None:
            live = self._live[turn.session] = _Live()
            self.tally.most_sessions = max(self.tally.most_sessions, len(self._live))
        if live.is_busy:
            live.waiting.append((turn, next_s))
            return
        self._idle.pop(turn.session, None)
        live.is_busy = True
        self._enqueue(turn, next_s, turn.arrival_s)

    def _enqueue(self, turn: Turn, next_s: float, now_s: float) -> None:
        if self._load.slot_count is None:
            self._finish(turn, next_s, self._start(turn, now_s)[0])
            return
        self._queue.append((turn, next_s, now_s))
        self.tally.longest_queue = max(self.tally.longest_queue, len(self._queue))
        self._event_count += 1
        order = self._event_count
        if self._lies(turn):
            order = zlib.crc32(b"place " + turn.session) % (2 * order)
        self.ledger.policy.hinted(turn.session, float(order))
        self._serve(now_s)

    def _serve(self, now_s: float) -> None:
        while self._queue and self._free_slots:
            turn, next_s, since_s = self._queue.popleft()
            self._free_slots -= 1
            self.tally.queue_wait_s += now_s - since_s
            _, busy_s = self._start(turn, now_s)
            end_s = now_s + busy_s
            self._at(end_s, lambda due_s, turn=turn, next_s=next_s: self._end(turn, next_s, due_s))  # type: ignore[misc]
        self._prefetch(now_s)

    def _end(self, turn: Turn, next_s: float, now_s: float) -> None:
        self._free_slots += 1
        self._finish(turn, next_s, now_s)
        self._serve(now_s)

    def _start(self, turn: Turn, now_s: float) -> tuple[float, float]:
        """Look up, count, and promote. Returns now and how long the turn will keep its slot."""
        uid, load, tally = turn.session, self._load, self.tally
        live = self._live[uid]
        history_tokens = live.size_tokens if turn.history_tokens is None else turn.history_tokens
        is_later = live.turn_count > 0 if turn.number is None else turn.number > 1
        tier, wait_s = self.ledger.tier(uid), 0.0
        ready_s = self._ready_s.pop(uid, None)
        if tier is Tier.DRAM and ready_s is not None:
            tally.prefetches_in_time += ready_s <= now_s
            tally.prefetches_late += ready_s > now_s
            wait_s = max(ready_s - now_s, 0.0)
        is_dram_hit = tier is Tier.DRAM and not wait_s
        if tier is Tier.SSD:
            wait_s = self._read(history_tokens * load.token_bytes, now_s) - now_s
        tally.moved(self.ledger.arrived(uid, now_s))
        computed_tokens = turn.input_tokens + (history_tokens if tier is None else 0)
        tally.turns += 1
        tally.ssd_wait_s += wait_s
        if is_later:
            tally.later_turns += 1
            tally.later_tokens += history_tokens
            tally.dram_hits += is_dram_hit
            tally.ssd_hits += tier is not None and not is_dram_hit
            tally.hit_tokens += history_tokens if tier is not None else 0
            tally.recomputed_tokens += history_tokens if tier is None else 0
        copy_s = 0.0 if tier is None else history_tokens * load.token_bytes / load.dram_bytes_per_s
        busy_s = (
            wait_s + copy_s + load.prefill_s(computed_tokens) + turn.output_tokens / load.decode_tokens_per_s
        )
        return now_s, busy_s

    def _finish(self, turn: Turn, next_s: float, now_s: float) -> None:
        uid = turn.session
        live = self._live[uid]
        history_tokens = live.size_tokens if turn.history_tokens is None else turn.history_tokens
        self._live_tokens -= live.counted_tokens
        live.size_tokens = history_tokens + turn.input_tokens + turn.output_tokens
        live.counted_tokens = live.size_tokens if next_s < NEVER_S or live.waiting else 0
        self._live_tokens += live.counted_tokens
        self.peak_live_tokens = max(self.peak_live_tokens, self._live_tokens)
        live.turn_count = live.turn_count + 1 if turn.number is None else turn.number
        live.next_s, live.is_busy = next_s, False
        token_bytes = self._load.token_bytes
        # A store cannot tell what was asked from what was answered.
        new_tokens = turn.input_tokens + turn.output_tokens
        facts = Facts(live.size_tokens * token_bytes, live.turn_count, new_tokens * token_bytes)
        self.tally.moved(self.ledger.idle(uid, facts, now_s))
        self.tally.end_s = now_s
        if self._load.hints:
            self._hint(turn, next_s, now_s)
        if live.waiting:
            live.is_busy = True
            self._enqueue(*live.waiting.popleft(), now_s)
        else:
            self._idle[uid] = now_s

    def _hint(self, turn: Turn, next_s: float, now_s: float) -> None:
        """Say what the load's clients say; a lie ends what goes on, or is ten times too late or early."""
        hints, is_lie = self._load.hints, self._lies(turn)
        ends = (next_s == NEVER_S) is not is_lie
        if ends and Hint.ENDS in hints:
            self.ledger.policy.expected(turn.session, None)
        elif next_s < NEVER_S and Hint.RETURNS in hints:
            factor = (10.0 if zlib.crc32(b"late " + turn.session) % 2 else 0.1) if is_lie else 1.0
            self.ledger.policy.expected(turn.session, now_s + max(next_s - now_s, 0.0) * factor)

    def _lies(self, turn: Turn) -> bool:
        share = self._load.wrong_hint_share
        return (
            share > 0 and zlib.crc32(b"%s at %d" % (turn.session, int(turn.arrival_s * 1000))) < share * 2**32
        )

    def _read(self, size_bytes: int, now_s: float) -> float:
        """Read so much from SSD, behind what is being read; returns when it is there."""
        read_s = size_bytes / self._load.ssd_read_bytes_per_s
        # Where turns take no time none of them holds back the next, and a backlog would mean nothing.
        if self._load.slot_count is None:
            return now_s + read_s
        self._reader_free_s = max(self._reader_free_s, now_s) + read_s
        return self._reader_free_s

    def _prefetch(self, now_s: float) -> None:
        """Read ahead, one session at a time, while there is someone to read for."""
        while self._reader_free_s <= now_s:
            moves = self.ledger.prefetch()
            self.tally.moved(moves)
            if not moves or moves[-1].act is not Act.PROMOTE:
                return
            self._ready_s[moves[-1].uid] = self._read(moves[-1].size_bytes, now_s)
            self.tally.prefetches += 1
        if not self._is_awaited:
            self._is_awaited = True
            self._at(self._reader_free_s, self._read_is_over)

    def _read_is_over(self, now_s: float) -> None:
        self._is_awaited = False
        self._prefetch(now_s)
