"""One replay: a trace, a policy and a load on a virtual clock. The policy code is that of `core.placement`.

Turns take no time; or they do, and no session waits for another one's (`is_timed`); or they wait for slots,
first come first served, in a queue that the policy sees. A turn takes SSD reads, the copy from DRAM, prefill
(of missing tokens too) and decoding. A session's next turn comes no earlier than its last one ends. In a
closed loop it comes as long after that as its user thought: what the trace says, or the time between both
arrivals less what the answer takes that waits for nothing. The queue is `core.placement.schedule`, which
serves too: it says when a job is expected, overdue and given up. A full context window drops its earliest
half (CachedAttention, ATC'24, sections 3.4 and 4.1). Memory: live sessions, those that waited less than the
TTL; of a closed loop all turns. Not modelled: writes that hold back evictions.
"""

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ctxcache.core.placement.policy import Facts, Level, Policy
from ctxcache.core.placement.schedule import Job, Schedule
from ctxcache.core.placement.value import fetch_lead_s
from ctxcache.simulate.load import NEVER_S, Liar, Lie, Load, Overflow, TraceHint
from ctxcache.simulate.store import Fetch, Layers, MakePolicy, Store
from ctxcache.simulate.tally import HitTally
from ctxcache.simulate.trace import TraceTurn

ENGINE = "engine"
LOOKED_EVERY_S = 0.5
"""How long it takes a server at most to see that it is time to fetch a session."""
JOBS_PER_LOOK = 1024
"""Overdue jobs looked at before the next ones are asked for."""


class Waiting:
    """One engine's jobs. Owned by a replay; `is_held` says whether the store has anything of a session."""

    def __init__(self, policy: Policy, is_held: Callable[[bytes], bool]) -> None:
        self._policy, self._is_held = policy, is_held
        self._schedule = Schedule(self._reordered)
        self._job_ids: dict[bytes, str] = {}
        """The job that a session's next turn is, where it was told."""
        self._job_count = 0
        self._now_s = 0.0

    def passed(self, now_s: float) -> None:
        """Time passes: jobs that should have started are put off."""
        self._now_s = now_s
        self._policy.passed(now_s)
        while self._schedule.passed(now_s, JOBS_PER_LOOK):
            pass

    def put(self, uid: bytes, position: float, now_s: float, *, is_turn: bool = True) -> None:
        """A job of the session waits there; without `is_turn` it will never start."""
        self._now_s = now_s
        self._job_count += 1
        job = Job(str(self._job_count), uid if self._is_held(uid) else None, position)
        if is_turn:
            self._job_ids[uid] = job.job_id
        self._schedule.put(ENGINE, job, now_s)

    def started(self, uid: bytes, now_s: float) -> None:
        """The session's turn has begun, which took it out of the queue."""
        self._now_s = now_s
        job_id = self._job_ids.pop(uid, None)
        if job_id is not None:
            self._schedule.gone(ENGINE, job_id, now_s, is_started=True)

    def rested(self, uid: bytes) -> None:
        """The turn is over: what still waits of the session was not it."""
        # Looked at behind the turn: a second job of the session is what its next return is foreseen by.
        order = self._schedule.order(uid)
        if order is not None:
            self._reordered(uid, order)

    def lost(self) -> None:
        """The engine is gone, and with it all that waits."""
        self._schedule.drop(ENGINE, self._schedule.job_count(ENGINE))
        self._job_ids.clear()

    def _reordered(self, uid: bytes, order: float | None) -> None:
        if order is None:
            self._policy.withdrawn(uid)
        elif self._is_held(uid):
            # As the server does: what is foreseen of a job is dated by now, not by the last event.
            self._policy.passed(self._now_s)
            self._policy.hinted(uid, order)


def dropped_tokens(token_count: int, context_tokens: int) -> int:
    """How many of the earliest tokens go so that the others fit; halves of the window, as few as will do."""
    if token_count <= context_tokens:
        return 0
    half_tokens = (context_tokens + 1) // 2
    return min(-(-(token_count - context_tokens) // half_tokens) * half_tokens, token_count)


STEP_TURNS = 1024
"""Turns between two calls of `step`."""


@dataclass(slots=True)
class _Live:
    """A session between its first turn and its end. `waiting` are turns that came before the last was over.

    Of its tokens since the first, `dropped_tokens` fell out of the context window. Of the turn that runs,
    `history_tokens` and `input_tokens` are what of each the window holds, `cut_tokens` what fell out at its
    start.
    """

    turn_count: int = 0
    size_tokens: int = 0
    dropped_tokens: int = 0
    history_tokens: int = 0
    input_tokens: int = 0
    cut_tokens: int = 0
    counted_bytes: int = 0
    next_s: float = NEVER_S
    is_busy: bool = False
    waiting: deque[tuple[TraceTurn, float]] = field(default_factory=deque)


# The way of a turn. Events are callbacks on a heap, by time and number:
#
#     trace ──► _arrive ── session busy ──► `waiting`: behind the session's own turns
#                  │                            │ the turn before is over
#                  ▼                            ▼
#               _enqueue ── with slots ──► queue ──► _serve ──┐
#                  └─────── without ─────► _play ─────────────┤
#                                                             ▼
#                         idle, then expired ◄── _finish ◄── _start
class Replay:
    """Plays turns; `run` once. `next_arrivals_s` is `study.look`'s, None where nothing needs the future.

    `is_footprint`: the peak of live state is counted, for which the future is known.
    """

    def __init__(
        self,
        load: Load,
        make_policy: MakePolicy,
        *,
        next_arrivals_s: "array[float] | None" = None,
        is_footprint: bool = False,
    ) -> None:
        self._load = load
        self._liar = Liar(load.wrong_hint_share, load.lies)
        self.store = store = Store(load, make_policy, self._next_use_s)
        self.waiting = Waiting(store.tiers.policy, lambda uid: store.tiers.tier(uid) is not None)
        self._live_bytes = self.peak_live_bytes = 0
        """State in a turn, or needed by a later one, held or not; 0 where it is not counted."""
        self._is_footprint = is_footprint
        self._takes_time = load.is_timed or load.slot_count is not None
        self._next_arrivals_s = next_arrivals_s
        self._live: dict[bytes, _Live] = {}
        self._idle: OrderedDict[bytes, float] = OrderedDict()
        self._queue: deque[tuple[TraceTurn, float, float]] = deque()
        self._free_slots = load.slot_count or 0
        self._expiry_s = math.inf
        """When the first of those that are idle expires, or earlier."""
        self._has_queue = load.slot_count is not None
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._event_count = 0
        self._is_awaited = False
        self._started_count = 0
        self._following: dict[bytes, deque[TraceTurn]] = {}
        """The turns that follow in a closed loop, all with their think times."""

    @property
    def tally(self) -> HitTally:
        """The counts since the end of the warm-up."""
        return self.store.tally

    def run(self, turns: Iterable[TraceTurn], step: Callable[[int], None] = lambda _: None) -> HitTally:
        """Play all turns to their ends. `step` hears how many have arrived, now and then."""
        index = 0
        for index, turn in enumerate(self._first_turns(turns) if self._load.is_closed else turns, 1):
            self._until(turn.arrival_s)
            if self._has_queue:
                self.waiting.passed(turn.arrival_s)
            self._arrive(turn, self._next_arrivals_s[index - 1] if self._next_arrivals_s else NEVER_S)
            if index % STEP_TURNS == 0:
                step(index)
        self._until(math.inf)
        step(index)
        return self.tally

    # The first turn of each session comes when the trace says; those behind it when the one before is over.
    def _first_turns(self, turns: Iterable[TraceTurn]) -> list[TraceTurn]:
        """The turns that begin sessions; the others come when they are due."""
        firsts: list[TraceTurn] = []
        last: dict[bytes, TraceTurn] = {}
        for turn in turns:
            before = last.get(turn.session)
            last[turn.session] = turn
            if before is None:
                firsts.append(turn)
                continue
            if turn.think_s is None:
                gap_s = turn.arrival_s - before.arrival_s - self._load.answer_s(before)
                # `_replace` takes thrice as long.
                turn = TraceTurn._make((*turn[:-1], max(gap_s, 0.0)))  # noqa: PLW2901
            following = self._following.get(turn.session)
            if following is None:
                following = self._following[turn.session] = deque()
            following.append(turn)
        return firsts

    def _come_next(self, uid: bytes, now_s: float) -> float:
        """Let the session's next turn come when its user has thought; returns when, infinity for never."""
        following = self._following.get(uid)
        if not following:
            return NEVER_S
        turn = following.popleft()
        due_s = now_s + (turn.think_s or 0.0)
        turn = TraceTurn._make((uid, due_s, *turn[2:]))
        self._at(due_s, lambda _: self._arrive(turn, NEVER_S))
        return due_s

    def _next_use_s(self, uid: bytes) -> float:
        live = self._live.get(uid)
        return live.next_s if live else NEVER_S

    def _until(self, now_s: float) -> None:
        events = self._events
        while events and events[0][0] <= now_s:
            due_s, _, event = heappop(events)
            # Before the event, in the order of time: an event may ask for a session that has expired by then.
            if due_s >= self._expiry_s:
                self._expire_idle(due_s)
            if self._has_queue:
                self.waiting.passed(due_s)
            event(due_s)
        # Not at the very end, where time is infinite: what is left has not expired.
        if self._expiry_s <= now_s < math.inf:
            self._expire_idle(now_s)

    def _expire_idle(self, now_s: float) -> None:
        while self._idle:
            uid, since_s = next(iter(self._idle.items()))
            self._expiry_s = since_s + self._load.ttl_s
            if self._expiry_s > now_s:
                return
            del self._idle[uid]
            self._expire(uid)
        self._expiry_s = math.inf

    def _expire(self, uid: bytes) -> None:
        self._live_bytes -= self._live.pop(uid).counted_bytes
        self.store.expire(uid)

    def _at(self, due_s: float, event: Callable[[float], None]) -> None:
        # By time, then by number: of two events at one time the first made comes first, and callbacks are
        # never compared.
        self._event_count += 1
        heappush(self._events, (due_s, self._event_count, event))

    def _arrive(self, turn: TraceTurn, next_s: float) -> None:
        uid = turn.session
        live = self._live.get(uid)
        if live is None:
            live = self._live[uid] = _Live()
            self.tally.most_sessions = max(self.tally.most_sessions, len(self._live))
        if live.is_busy:
            live.waiting.append((turn, next_s))
            return
        self._idle.pop(uid, None)
        live.is_busy = True
        self._enqueue(turn, next_s, turn.arrival_s)

    def _enqueue(self, turn: TraceTurn, next_s: float, now_s: float) -> None:
        if not self._has_queue:
            self._play(turn, next_s, now_s)
            return
        self._queue.append((turn, next_s, now_s))
        self.tally.longest_queue = max(self.tally.longest_queue, len(self._queue))
        self._event_count += 1
        order = self._liar.order(turn, self._event_count)
        if order is not None:
            self.waiting.put(turn.session, order, now_s)
        self._serve(now_s)

    def _play(self, turn: TraceTurn, next_s: float, now_s: float) -> None:
        """Begin a turn that waits for nothing, and end it when its time is over."""
        busy_s = self._start(turn, now_s, now_s)
        if self._takes_time:
            self._at(now_s + busy_s, lambda due_s: self._finish(turn, next_s, due_s))
        else:
            self._finish(turn, next_s, now_s)

    def _serve(self, now_s: float) -> None:
        while self._queue and self._free_slots:
            turn, next_s, since_s = self._queue.popleft()
            self._free_slots -= 1
            end_s = now_s + self._start(turn, since_s, now_s)
            # Bound as defaults: the loop goes on before the event comes.
            self._at(end_s, lambda due_s, turn=turn, next_s=next_s: self._end(turn, next_s, due_s))  # type: ignore[misc]
        self._prefetch(now_s)

    def _end(self, turn: TraceTurn, next_s: float, now_s: float) -> None:
        self._free_slots += 1
        self._finish(turn, next_s, now_s)
        self._serve(now_s)

    def _start(self, turn: TraceTurn, since_s: float, now_s: float) -> float:
        """Look up, promote and count a turn that came at `since_s`; returns how long it takes."""
        uid, load, store = turn.session, self._load, self.store
        # Turns that are served, not those that arrived: where they wait, the queue is as warm as the store.
        if self._started_count == load.warm_up_count:
            store.tally = HitTally(begin_s=now_s, end_s=now_s)
        self._started_count += 1
        live = self._live[uid]
        is_later = live.turn_count > 0 if turn.number is None else turn.number > 1
        self._fit(turn, live)
        if live.cut_tokens and load.overflow is Overflow.INVALIDATE:
            store.void(uid)
        # Looked up before `begin`, which promotes: the hit counts where the state was.
        tier = store.tiers.tier(uid)
        history_bytes = live.history_tokens * load.token_bytes
        fetch = store.begin(uid, history_bytes, now_s)
        self.waiting.started(uid, now_s)
        computed_tokens, copy_s = live.input_tokens, 0.0
        if tier is None:
            computed_tokens += live.history_tokens
        else:
            copy_s = history_bytes / load.dram_bytes_per_s
        prefill_s, fetch_s = load.prefill_s(computed_tokens), fetch.whole_s
        if load.layer_count is None:
            first_token_s = fetch_s + copy_s + prefill_s
        else:
            first_token_s = self._by_layer_s(load.layer_count, tier, fetch, copy_s, prefill_s)
        tally = store.tally
        tally.turns += 1
        tally.ssd_wait_s += fetch_s
        tally.queue_wait_s += now_s - since_s
        tally.computed_tokens += computed_tokens
        tally.prompt_tokens += live.input_tokens + live.history_tokens
        bucket = tally.ttft.add(now_s - since_s + first_token_s)
        if is_later:
            # One logarithm for both histograms where nothing waited: it is a good part of a turn's cost.
            if now_s == since_s:
                tally.later_ttft.add_to(bucket, first_token_s)
            else:
                tally.later_ttft.add(first_token_s)
            self._count(uid, live.history_tokens, tier, is_at_hand=tier is Level.MEMORY and not fetch.ready_s)
        if self._takes_time and self._is_footprint:
            self._needs(live, load.stored_bytes(live.history_tokens + live.input_tokens + turn.output_tokens))
        return first_token_s + turn.output_tokens / load.decode_tokens_per_s

    def _by_layer_s(
        self, layer_count: int, tier: Level | None, fetch: Fetch, copy_s: float, prefill_s: float
    ) -> float:
        """When the first token comes, from the turn's start on, where layers come one behind another."""
        resident = self._load.resident_layer_count
        in_dram = 0 if tier is Level.BELOW else layer_count if resident is None else resident
        return Layers(layer_count, in_dram, copy_s, prefill_s).first_token_s(fetch)

    def _fit(self, turn: TraceTurn, live: _Live) -> None:
        """Set what the context window holds of the prompt: its end."""
        history_tokens = live.size_tokens
        if turn.history_tokens is not None:
            history_tokens = max(turn.history_tokens - live.dropped_tokens, 0)
        live.history_tokens, live.input_tokens, live.cut_tokens = history_tokens, turn.input_tokens, 0
        if self._load.context_tokens is None:
            return
        cut_tokens = dropped_tokens(history_tokens + turn.input_tokens, self._load.context_tokens)
        if cut_tokens:
            self.tally.overflows += 1
            live.dropped_tokens += cut_tokens
            live.cut_tokens = min(cut_tokens, history_tokens)
            live.history_tokens -= live.cut_tokens
            live.input_tokens -= cut_tokens - live.cut_tokens

    def _count(self, uid: bytes, history_tokens: int, tier: Level | None, *, is_at_hand: bool) -> None:
        """Count a later turn by where its history was."""
        tally = self.tally
        tally.later_turns += 1
        tally.later_tokens += history_tokens
        if tier is None:
            tally.recomputed_tokens += history_tokens
            self.store.missed(uid, history_tokens)
            return
        tally.hit_tokens += history_tokens
        tally.dram_hits += is_at_hand
        tally.ssd_hits += not is_at_hand

    def _finish(self, turn: TraceTurn, next_s: float, now_s: float) -> None:
        uid, load, store = turn.session, self._load, self.store
        live = self._live[uid]
        if load.is_closed:
            next_s = self._come_next(uid, now_s)
        # A session's tokens before and after a turn, in a full window:
        #
        #     | cut at the start | history | input | answer |
        #     └ dropped ─────────┘ └ late: a second cut, where the answer does not fit either
        size_tokens = live.history_tokens + live.input_tokens + turn.output_tokens
        late_tokens = 0 if load.context_tokens is None else dropped_tokens(size_tokens, load.context_tokens)
        live.size_tokens = size_tokens - late_tokens
        live.turn_count = live.turn_count + 1 if turn.number is None else turn.number
        live.next_s, live.is_busy = next_s, False
        store.tally.end_s = now_s
        size_bytes = load.stored_bytes(live.size_tokens)
        if late_tokens:
            store.tally.overflows += 1
            live.dropped_tokens += late_tokens
        if late_tokens and load.overflow is Overflow.INVALIDATE:
            size_bytes = 0
            store.void(uid)
        else:
            new_bytes = (live.input_tokens + turn.output_tokens) * load.token_bytes
            answer_bytes = turn.output_tokens * load.token_bytes
            facts = Facts(size_bytes, live.turn_count, new_bytes, load.token_bytes, answer_bytes)
            gone_bytes = load.whole_bytes(live.cut_tokens + late_tokens)
            valid_bytes = load.whole_bytes(live.cut_tokens + live.history_tokens)
            store.end(uid, facts, range(gone_bytes, valid_bytes), now_s)
            self.waiting.rested(uid)
        if self._is_footprint:
            self._needs(live, size_bytes if next_s < NEVER_S or live.waiting else 0)
        if load.hints:
            self._hint(turn, next_s, now_s)
        if live.waiting:
            live.is_busy = True
            self._enqueue(*live.waiting.popleft(), now_s)
        else:
            self._idle[uid] = now_s
            self._expiry_s = min(self._expiry_s, now_s + load.ttl_s)
            # A job that never comes waits behind all that were told before it.
            if self._liar.tells(Lie.PHANTOM, turn):
                self._event_count += 1
                self.waiting.put(uid, float(self._event_count), now_s, is_turn=False)

    def _needs(self, live: _Live, size_bytes: int) -> None:
        """Let the session be live with so many bytes from now on."""
        self._live_bytes += size_bytes - live.counted_bytes
        live.counted_bytes = size_bytes
        self.peak_live_bytes = max(self.peak_live_bytes, self._live_bytes)

    def _hint(self, turn: TraceTurn, next_s: float, now_s: float) -> None:
        """Say what the load's clients say; a lie ends what goes on, or has another time."""
        hints = self._load.hints
        ends = (next_s == NEVER_S) is not self._liar.tells(Lie.HINT, turn)
        if ends and TraceHint.ENDS in hints:
            self.store.tiers.policy.expected(turn.session, None)
        elif next_s < NEVER_S and TraceHint.RETURNS in hints:
            return_s = self._liar.return_s(turn, now_s, next_s)
            self.store.tiers.policy.expected(turn.session, return_s)
            size_bytes = self._load.stored_bytes(self._live[turn.session].size_tokens)
            due_s = max(return_s - fetch_lead_s(size_bytes), now_s)
            self._at(due_s + LOOKED_EVERY_S, self._fetch_expected)

    def _fetch_expected(self, now_s: float) -> None:
        """It is time to fetch a session that is said to return."""
        self.store.tiers.policy.passed(now_s)
        self._prefetch(now_s)

    def _prefetch(self, now_s: float) -> None:
        """Read ahead, one session at a time, while there is someone to read for."""
        # While the SSD reads for one session, nothing is begun for another: the policy may know better by
        # then.
        while self.store.ssd.reader_free_s <= now_s:
            if not self.store.prefetch(now_s):
                return
        if not self._is_awaited:
            self._is_awaited = True
            self._at(self.store.ssd.reader_free_s, self._read_is_over)

    def _read_is_over(self, now_s: float) -> None:
        self._is_awaited = False
        self._prefetch(now_s)
