"""The simulated store: tiers that serve, an SSD in time, and counts of what they do. Knows no queue.

Events come in, and moves come out, to be carried out in the order given. A session lies in one tier, whole. A
session in a turn, or pinned, is never moved by another's need. Worst case: everything is pinned, and what
comes is refused.

With inclusive tiers, memory is a cache of the tier below, as the server's is. A session is written below
once, if it is worth that, and then by what it grew; leaving memory then costs nothing and frees nothing
below. A session that is not admitted below lies in memory alone until it is admitted, or leaves.

The SSD serves one read at a time; writes queue behind each other and share its speed with reads. Memory: an
entry per session between its first turn and its end.
"""

import enum
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.core.placement.order import Accepts
from ctxcache.core.placement.policy import Candidate, Capacities, Facts, Level, Policy, is_worth_writing
from ctxcache.simulate.leaving import leaving
from ctxcache.simulate.load import Load
from ctxcache.simulate.tally import HitTally


class Fetch(NamedTuple):
    """How a history comes to DRAM.

    The part prefetched after `ready_s`; a read from `begin_s` on brings the rest.
    """

    ready_s: float = 0.0
    begin_s: float = 0.0
    read_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """When all of it is in DRAM."""
        return max(self.ready_s, self.begin_s + self.read_s)


AT_HAND = Fetch()


class Layers(NamedTuple):
    """`layer_count` layers of a history, the first `resident_count` of which DRAM has.

    Copies and prefill are of all of them.
    """

    layer_count: int
    resident_count: int
    copy_s: float
    prefill_s: float

    # Three stages, one layer after the other; the slowest sets the pace. Four layers, the first two in DRAM:
    #
    #     SSD       | read 2 | read 3 |
    #     copy      | 0 | 1 |  | 2 |    | 3 |
    #     prefill       | 0 | 1 |  | 2 |    | 3 |
    #                                        └ first token
    #
    # The longest of three ways counts: all layers at the slower stage's pace from the start, those that are
    # read at that pace from the first read on, and the last read.
    def first_token_s(self, fetch: Fetch) -> float:
        """When the last layer's prefill ends: the longest way through the stages."""
        copy_s, prefill_s = self.copy_s / self.layer_count, self.prefill_s / self.layer_count
        slower_s = max(copy_s, prefill_s)
        last_s = fetch.ready_s + (self.layer_count - 1) * slower_s
        missing = self.layer_count - self.resident_count
        if missing:
            read_s = fetch.read_s / missing
            last_s = max(
                last_s, fetch.begin_s + read_s + (missing - 1) * slower_s, fetch.begin_s + fetch.read_s
            )
        return last_s + copy_s + prefill_s

    def hidden(self, read_all_s: float) -> int:
        """How many of the first layers DRAM needs for a first token as early as with all.

        Reading all takes so long.
        """
        for resident in range(self.layer_count):
            read_s = read_all_s * (self.layer_count - resident) / self.layer_count
            layers = self._replace(resident_count=resident)
            if math.isclose(layers.first_token_s(Fetch(read_s=read_s)), self.at_once_s, rel_tol=1e-9):
                return resident
        return self.layer_count

    @property
    def at_once_s(self) -> float:
        """The first token where DRAM has all layers."""
        return self._replace(resident_count=self.layer_count).first_token_s(Fetch())


class Act(enum.Enum):
    """An act on a session."""

    ADMIT = "admit"
    GROW = "grow"
    PROMOTE = "promote"
    DEMOTE = "demote"
    DROP = "drop"
    EVICT = "evict"
    REFUSE = "refuse"

    # Enum's own hashes the name anew, in Python.
    __hash__ = object.__hash__


_NOTHING_ELSE = frozenset({Act.ADMIT, Act.GROW})
"""Acts that need no count of their own."""


class Move(NamedTuple):
    """`size_bytes` of a session to be moved, `tier` being where they lie afterwards (or lay, of EVICT).

    DROP: they leave DRAM, and SSD has them.
    """

    act: Act
    uid: bytes
    size_bytes: int
    tier: Level


@dataclass(slots=True)
class _Held:
    size_bytes: int
    tier: Level
    pin_count: int = 0
    is_written: bool = True
    """False where DRAM alone has it, which is so in inclusive tiers only."""


# A session by where it lies. Of exclusive tiers (this class) it lies in one, of inclusive ones (below) in
# SSD, and maybe in DRAM too:
#
#     exclusive   DRAM ── demote ──► SSD ── evict ──► gone           SSD ── promote ──► DRAM
#     inclusive   DRAM and SSD ── drop ──► SSD ── evict ──► gone     nothing is written when it leaves DRAM
#                 DRAM alone (not worth writing) ── written, or evicted
class Tiers:
    """Sessions by tier. `buffer_bytes` of DRAM are kept free for promotions and growth.

    Owned by its caller.
    """

    def __init__(self, capacities: Capacities, policy: Policy, *, buffer_bytes: int = 0) -> None:
        if not 0 <= buffer_bytes <= capacities.memory_bytes:
            raise ValueError(f"a buffer of {buffer_bytes} B in {capacities.memory_bytes} B of DRAM")
        self.policy, self._order = policy, leaving(policy)
        self._limits = {Level.MEMORY: capacities.memory_bytes, Level.BELOW: capacities.below_bytes}
        self._buffer_bytes = buffer_bytes
        self._used = dict.fromkeys(Level, 0)
        self._held: dict[bytes, _Held] = {}
        # No need of a turn moves these: a turn reads them.
        self._in_turn: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._held)

    def used_bytes(self, tier: Level) -> int:
        """Bytes of sessions that lie in the tier."""
        return self._used[tier]

    def tier(self, uid: bytes) -> Level | None:
        """Where the session lies; None where it does not."""
        held = self._held.get(uid)
        return held.tier if held else None

    def is_on_ssd(self, uid: bytes) -> bool:
        """Whether SSD has all of the session, whichever tier it lies in."""
        return self.tier(uid) is Level.BELOW

    def pin(self, uid: bytes) -> None:
        """Keep a held session where it is, once more; raises KeyError for one that is not held."""
        self._held[uid].pin_count += 1

    def unpin(self, uid: bytes) -> None:
        """Take back one `pin`."""
        self._held[uid].pin_count -= 1

    def arrived(self, uid: bytes, now_s: float) -> list[Move]:
        """A turn begins: what is on SSD is promoted if DRAM has or can make room, else read where it is."""
        moves: list[Move] = []
        self._in_turn.add(uid)
        self.policy.arrived(uid, now_s)
        self.policy.withdrawn(uid)
        if self.tier(uid) is Level.BELOW:
            self._promote(uid, moves, lambda other: other != uid)
        self._order.discard(uid)
        return moves

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> list[Move]:
        """The turn is over, and the session has that size: it is kept if there is room, DRAM first."""
        moves: list[Move] = []
        self._in_turn.add(uid)
        self.policy.idle(uid, facts, now_s)
        held = self._held.get(uid)
        if held is None:
            self._admit(uid, facts.size_bytes, moves)
        else:
            self._resize(uid, held, facts.size_bytes, moves)
        self._in_turn.discard(uid)
        if uid in self._held:
            self._order.put(uid, self._held[uid].tier)
        # After the turn, so that the buffer is free when the next one begins.
        self._make_room(Level.MEMORY, self._buffer_bytes, moves)
        return moves

    def ended(self, uid: bytes) -> list[Move]:
        """The session was deleted or expired, pinned or not."""
        held = self._held.pop(uid, None)
        self._in_turn.discard(uid)
        self._order.discard(uid)
        self.policy.ended(uid)
        if held is None:
            return []
        self._give_back(held)
        return [Move(Act.EVICT, uid, held.size_bytes, held.tier)]

    def prefetch(self) -> list[Move]:
        """Promote whom the policy wants in DRAM, unless that pushes out one that is needed sooner.

        The promotion is the last move; none when there is none, or no room.
        """
        uid = self.policy.prefetch()
        # A policy may name a session that has left meanwhile, or that a turn reads.
        if uid is None or not self._may_move(uid):
            return []
        moves: list[Move] = []
        # The buffer stays free: the session needed last would be demoted for it, and be promoted again.
        spare_bytes = self._buffer_bytes
        # Nor may this session leave SSD for one that DRAM gives up.
        self._in_turn.add(uid)
        self._promote(
            uid, moves, lambda other: other != uid and not self.policy.is_needed_soon(other, uid), spare_bytes
        )
        self._in_turn.discard(uid)
        return moves

    def _free_bytes(self, tier: Level) -> int:
        return self._limits[tier] - self._used[tier]

    def _may_move(self, uid: bytes) -> bool:
        held = self._held.get(uid)
        return held is not None and not held.pin_count and uid not in self._in_turn

    def _admit(self, uid: bytes, size_bytes: int, moves: list[Move]) -> None:
        for tier in Level:
            if self._make_room(tier, size_bytes, moves):
                self._held[uid] = _Held(size_bytes, tier)
                self._used[tier] += size_bytes
                self.policy.placed(uid, tier)
                moves.append(Move(Act.ADMIT, uid, size_bytes, tier))
                return
        self.policy.evicted(uid)
        moves.append(Move(Act.REFUSE, uid, size_bytes, Level.MEMORY))

    def _resize(self, uid: bytes, held: _Held, size_bytes: int, moves: list[Move]) -> None:
        """Grow, or shrink, in place.

        A session that cannot grow is given up, unless it is pinned as it was.
        """
        more_bytes = size_bytes - held.size_bytes
        if self._make_room(held.tier, max(more_bytes, 0), moves, lambda other: other != uid):
            self._used[held.tier] += more_bytes
            held.size_bytes = size_bytes
            moves.append(Move(Act.GROW, uid, more_bytes, held.tier))
            return
        moves.append(Move(Act.REFUSE, uid, more_bytes, held.tier))
        if not held.pin_count:
            self._evict(uid, moves)

    def _promote(self, uid: bytes, moves: list[Move], may_leave: Accepts, spare_bytes: int = 0) -> None:
        size_bytes = self._held[uid].size_bytes
        if self._make_room(Level.MEMORY, size_bytes + spare_bytes, moves, may_leave):
            self._place(uid, Level.MEMORY)
            moves.append(Move(Act.PROMOTE, uid, size_bytes, Level.MEMORY))

    def _make_room(
        self, tier: Level, needed_bytes: int, moves: list[Move], may_leave: Accepts | None = None
    ) -> bool:
        """Free that much of the tier. Whether it was possible; what left is gone either way.

        `may_leave`: of those that are neither pinned nor in a turn; None for all of them.
        """
        if needed_bytes > self._limits[tier]:
            return False

        while self._free_bytes(tier) < needed_bytes:
            victim = self._first(tier, may_leave)
            if victim is None:
                return False
            # One that fits is demoted. One that does not makes SSD give up its own first victim, which may be
            # the same, and is looked at again. One larger than all of SSD leaves the store.
            held = self._held[victim]
            if tier is Level.MEMORY and held.size_bytes <= self._free_bytes(Level.BELOW):
                self._place(victim, Level.BELOW)
                moves.append(Move(Act.DEMOTE, victim, held.size_bytes, Level.BELOW))
                continue
            if tier is Level.MEMORY and held.size_bytes <= self._limits[Level.BELOW]:
                victim = self._first(Level.BELOW, may_leave)
                if victim is None:
                    return False
            self._evict(victim, moves)
        return True

    def _first(self, tier: Level, may_leave: Accepts | None) -> bytes | None:
        """The session that leaves the tier first, of those that may.

        Out of SSD means out of the store, from either tier; what SSD does not have yet cannot leave it.
        """
        sessions, in_turn, is_memory = self._held, self._in_turn, tier is Level.MEMORY

        def accepts(uid: bytes) -> bool:
            held = sessions.get(uid)
            if held is None or held.pin_count or uid in in_turn:
                return False
            # With inclusive tiers a session in DRAM may be the one that SSD gives up first.
            is_there = held.tier is Level.MEMORY if is_memory else held.is_written
            return is_there and (may_leave is None or may_leave(uid))

        return self._order.first(tier, accepts)

    def _place(self, uid: bytes, tier: Level) -> None:
        held = self._held[uid]
        self._used[held.tier] -= held.size_bytes
        self._used[tier] += held.size_bytes
        held.tier = tier
        self.policy.placed(uid, tier)
        self._order.put(uid, tier)

    def _evict(self, uid: bytes, moves: list[Move]) -> None:
        held = self._held.pop(uid)
        self._give_back(held)
        self._order.discard(uid)
        self.policy.evicted(uid)
        self.policy.withdrawn(uid)
        moves.append(Move(Act.EVICT, uid, held.size_bytes, held.tier))

    def _give_back(self, held: _Held) -> None:
        """The session lies nowhere any more."""
        self._used[held.tier] -= held.size_bytes


class InclusiveTiers(Tiers):
    """See Tiers. SSD takes `total_bytes` of the capacities; `used_bytes` of it counts what is in DRAM, too.

    ADMIT and GROW on SSD, and DEMOTE, say what is written there. DRAM keeps as much of what was just used as
    it takes.
    """

    def __init__(self, capacities: Capacities, policy: Policy, *, buffer_bytes: int = 0) -> None:
        super().__init__(capacities, policy, buffer_bytes=buffer_bytes)
        self._limits[Level.BELOW] = capacities.total_bytes

    def is_on_ssd(self, uid: bytes) -> bool:
        """See Tiers: in DRAM, too, or there alone."""
        held = self._held.get(uid)
        return held is not None and held.is_written

    def _admit(self, uid: bytes, size_bytes: int, moves: list[Move]) -> None:
        # DRAM first: rows are there before anybody can tell what they are worth.
        # Without room in DRAM it goes to SSD at once, worth it or not: there is nowhere else.
        tier = Level.MEMORY if self._make_room(Level.MEMORY, size_bytes, moves) else Level.BELOW
        is_written = tier is Level.BELOW or self._is_worth_writing(uid, size_bytes)
        if is_written and not self._make_room(Level.BELOW, size_bytes, moves):
            self.policy.evicted(uid)
            moves.append(Move(Act.REFUSE, uid, size_bytes, Level.BELOW))
            return
        held = self._held[uid] = _Held(size_bytes, tier, is_written=is_written)
        for each in _tiers(held):
            self._used[each] += size_bytes
        moves.append(Move(Act.ADMIT, uid, size_bytes, Level.BELOW if is_written else Level.MEMORY))
        self.policy.placed(uid, tier)

    def _resize(self, uid: bytes, held: _Held, size_bytes: int, moves: list[Move]) -> None:
        def may_leave(other: bytes) -> bool:
            return other != uid

        more_bytes = size_bytes - held.size_bytes
        has_room = held.tier is Level.BELOW or self._make_room(
            Level.MEMORY, max(more_bytes, 0), moves, may_leave
        )
        # A session that leaves DRAM, or is pinned, is written whatever it is worth: it would be lost.
        if not has_room or held.pin_count or self._is_worth_writing(uid, size_bytes):
            is_written = held.is_written or self._write(uid, moves)
            if not is_written or not self._make_room(Level.BELOW, max(more_bytes, 0), moves, may_leave):
                moves.append(Move(Act.REFUSE, uid, more_bytes, Level.BELOW))
                if not held.pin_count:
                    self._evict(uid, moves)
                return
        if not has_room:
            self._drop(uid, moves)
        for tier in _tiers(held):
            self._used[tier] += more_bytes
        held.size_bytes = size_bytes
        moves.append(Move(Act.GROW, uid, more_bytes, Level.BELOW if held.is_written else Level.MEMORY))

    def _is_worth_writing(self, uid: bytes, size_bytes: int) -> bool:
        """Whether SSD is to have it; it keeps what it has some of."""
        if self.is_on_ssd(uid):
            return True
        if not self.policy.is_worth_wear(uid):
            return False
        free_bytes = self._limits[Level.BELOW] - self._used[Level.BELOW]
        if size_bytes <= free_bytes:
            return True
        return is_worth_writing(size_bytes, free_bytes, self._leaving(uid))

    def _leaving(self, uid: bytes) -> Iterator[Candidate]:
        seen = {uid}
        while (victim := self._first(Level.BELOW, lambda other: other not in seen)) is not None:
            seen.add(victim)
            yield Candidate(self.policy.gives_way(victim, uid), self._held[victim].size_bytes)

    def _make_room(
        self, tier: Level, needed_bytes: int, moves: list[Move], may_leave: Accepts | None = None
    ) -> bool:
        limit_bytes, used = self._limits[tier], self._used
        if needed_bytes > limit_bytes:
            return False
        while limit_bytes - used[tier] < needed_bytes:
            victim = self._first(tier, may_leave)
            if victim is None:
                return False
            leave = self._drop if tier is Level.MEMORY else self._evict
            leave(victim, moves)
        return True

    def _drop(self, uid: bytes, moves: list[Move]) -> None:
        held = self._held[uid]
        is_worth = held.is_written or self._is_worth_writing(uid, held.size_bytes)
        if not is_worth or not (held.is_written or self._write(uid, moves)):
            self._evict(uid, moves)
            return
        self._place(uid, Level.BELOW)
        moves.append(Move(Act.DROP, uid, held.size_bytes, Level.BELOW))

    def _write(self, uid: bytes, moves: list[Move]) -> bool:
        """Write what only DRAM has. Whether there was room, or could be made."""
        held = self._held[uid]
        if not self._make_room(Level.BELOW, held.size_bytes, moves, lambda other: other != uid):
            return False
        held.is_written = True
        self._used[Level.BELOW] += held.size_bytes
        moves.append(Move(Act.DEMOTE, uid, held.size_bytes, Level.BELOW))
        return True

    def _place(self, uid: bytes, tier: Level) -> None:
        held = self._held[uid]
        # Only DRAM's part changes: SSD has it before and after.
        self._used[Level.MEMORY] += held.size_bytes * ((tier is Level.MEMORY) - (held.tier is Level.MEMORY))
        held.tier = tier
        self.policy.placed(uid, tier)
        self._order.put(uid, tier)

    def _give_back(self, held: _Held) -> None:
        for tier in _tiers(held):
            self._used[tier] -= held.size_bytes


BOTH = (Level.MEMORY, Level.BELOW)


def _tiers(held: _Held) -> tuple[Level, ...]:
    """Where the session takes room."""
    return BOTH if held.is_written and held.tier is Level.MEMORY else (held.tier,)


class Ssd:
    """`write_bytes_per_s` None: writes take no time. Not `is_serial`: no read waits for another.

    Where a read and a write meet, each goes half as fast until one of them is done.
    """

    def __init__(self, read_bytes_per_s: float, write_bytes_per_s: float | None, *, is_serial: bool) -> None:
        self._read_bytes_per_s = read_bytes_per_s
        self._write_bytes_per_s = write_bytes_per_s
        self._is_serial = is_serial
        self.reader_free_s = 0.0
        self._writer_free_s = 0.0

    def free_s(self, now_s: float) -> float:
        """When a read that is asked for now begins."""
        return max(self.reader_free_s, now_s) if self._is_serial else now_s

    def read(self, size_bytes: int, now_s: float) -> float:
        """Read so much; returns when it is there."""
        begin_s = self.free_s(now_s)
        read_s = size_bytes / self._read_bytes_per_s
        # A read of 4 s meets writes of 3 s. Both go half as fast while they meet, so each takes 3 s longer:
        #
        #     read    ▒▒▒▒▒▒ ▓         3 s of work in 6 s, then 1 s alone
        #     write   ▒▒▒▒▒▒
        shared_s = min(read_s, max(self._writer_free_s - begin_s, 0.0))
        self._writer_free_s += shared_s
        end_s = begin_s + read_s + shared_s
        self.reader_free_s = max(self.reader_free_s, end_s)
        return end_s

    def write(self, size_bytes: int, now_s: float) -> float:
        """Write so much behind what is being written; returns how far it lies behind, in seconds."""
        if self._write_bytes_per_s is None:
            return 0.0
        write_s = size_bytes / self._write_bytes_per_s
        begin_s = max(self._writer_free_s, now_s)
        self._writer_free_s = begin_s + write_s
        return self._writer_free_s - now_s


NextUse = Callable[[bytes], float]
"""When a session is needed next, in seconds of the trace."""
MakePolicy = Callable[[Capacities, NextUse], Policy]


class Loss(enum.Enum):
    """Why a session has no state."""

    GIVEN_UP = enum.auto()
    VOID = enum.auto()


@dataclass(slots=True)
class _Copy:
    """`written_bytes` of the session are on SSD and valid, whichever tier the tiers has it in."""

    written_bytes: int = 0
    ready_s: float = math.inf
    """When the prefetch under way, or not used yet, is in DRAM; infinity without one."""
    loss: Loss | None = None


class Store:
    """The kept state of sessions. `tally` may be exchanged between two calls."""

    def __init__(self, load: Load, make_policy: MakePolicy, next_use_s: NextUse) -> None:
        # Sessions count whole in the tiers: of their first layers alone DRAM takes so many more.
        dram_bytes = min(int(load.dram_bytes / load.resident_share), load.dram_bytes + load.ssd_bytes)
        capacities = Capacities(dram_bytes, load.dram_bytes + load.ssd_bytes - dram_bytes)
        policy = make_policy(capacities, next_use_s)
        make_tiers = InclusiveTiers if load.is_inclusive else Tiers
        self.tiers = make_tiers(capacities, policy, buffer_bytes=int(dram_bytes * load.buffer_share))
        self.tally = HitTally()
        self.ssd = Ssd(
            load.ssd_read_bytes_per_s,
            load.ssd_write_bytes_per_s,
            # Where turns take no time none of them holds back the next, and a backlog would mean nothing.
            is_serial=load.is_timed or load.slot_count is not None,
        )
        self._resident_share = load.resident_share
        self._read_bytes_per_s = load.ssd_read_bytes_per_s
        self._copies: dict[bytes, _Copy] = {}

    def begin(self, uid: bytes, history_bytes: int, now_s: float) -> Fetch:
        """A turn begins and reads its history; returns how that comes to DRAM, from now on."""
        ready_s, missing_share, copy = 0.0, 0.0, self._copies.get(uid)
        tier = self.tiers.tier(uid)
        if tier is Level.BELOW:
            missing_share = 1.0
        elif tier is Level.MEMORY:
            missing_share = 1.0 - self._resident_share
            # Counted when the turn comes: a prefetch that is under way is waited for, by what is left of it.
            if copy is not None and copy.ready_s < math.inf:
                self.tally.prefetch_met(copy.ready_s, now_s)
                ready_s = max(copy.ready_s - now_s, 0.0)
                copy.ready_s = math.inf
        fetch = AT_HAND
        if missing_share:
            begin_s = self.ssd.free_s(now_s)
            end_s = self._read(int(history_bytes * missing_share), now_s)
            fetch = Fetch(ready_s, begin_s - now_s, end_s - begin_s)
        elif ready_s:
            fetch = Fetch(ready_s)
        moves = self.tiers.arrived(uid, now_s)
        if moves:
            self._moved(moves, now_s)
        return fetch

    def end(self, uid: bytes, facts: Facts, valid_bytes: range, now_s: float) -> None:
        """The turn is over. `valid_bytes` of what the session had before are part of it still."""
        copy = self._copies.get(uid)
        if copy is None:
            copy = self._copies[uid] = _Copy()
        # SSD has a run of the session's bytes from its begin. A turn cuts both ends:
        #
        #     before    | written …………………………… | unwritten |
        #     after          | valid ……… |           begin: fell out of the window; end: no whole segment
        elif copy.written_bytes:
            copy.written_bytes = max(min(copy.written_bytes, valid_bytes.stop) - valid_bytes.start, 0)
        copy.loss = None
        self._moved(self.tiers.idle(uid, facts, now_s), now_s)
        if self.tiers.is_on_ssd(uid):
            self.tally.ssd_rewritten_bytes += self._write(copy, facts.size_bytes, now_s)

    def void(self, uid: bytes) -> None:
        """The session goes on, its state does not."""
        self._unprefetched(uid)
        self.tiers.ended(uid)
        self._copies[uid] = _Copy(loss=Loss.VOID)

    # A turn that finds nothing of an expired session has no entry here, by which `missed` knows it.
    def expire(self, uid: bytes) -> None:
        """The session is over."""
        self._unprefetched(uid)
        self._copies.pop(uid, None)
        self.tiers.ended(uid)

    def missed(self, uid: bytes, token_count: int) -> None:
        """Count a later turn that found nothing, by why it did."""
        copy, tally = self._copies.get(uid), self.tally
        if copy is None:
            tally.expired_turns += 1
        elif copy.loss is Loss.VOID:
            tally.void_turns += 1
        else:
            tally.regret_turns += 1
            tally.regret_tokens += token_count

    def prefetch(self, now_s: float) -> bool:
        """Begin to read one session ahead; whether there was one to read and room for it."""
        moves = self.tiers.prefetch()
        self._moved(moves, now_s)
        if not moves or moves[-1].act is not Act.PROMOTE:
            return False
        self._copies[moves[-1].uid].ready_s = self._read(
            int(moves[-1].size_bytes * self._resident_share), now_s
        )
        self.tally.prefetches += 1
        return True

    def _read(self, size_bytes: int, now_s: float) -> float:
        self.tally.ssd_read_s += size_bytes / self._read_bytes_per_s
        return self.ssd.read(size_bytes, now_s)

    def _moved(self, moves: Iterable[Move], now_s: float) -> None:
        tally = self.tally
        for move in moves:
            act, uid, size_bytes, _ = move
            if act in _NOTHING_ELSE:
                continue
            if act is Act.EVICT:
                tally.evicted_sessions += 1
                self._lost(uid)
            elif act is Act.PROMOTE:
                tally.promoted_bytes += size_bytes
            elif act is Act.DROP:
                self._unprefetched(uid)
            elif act is Act.DEMOTE:
                self._unprefetched(uid)
                tally.ssd_rewritten_bytes += size_bytes
                self._write(self._copies[uid], size_bytes, now_s)
            elif act is Act.REFUSE:
                tally.refused += 1
                self._lost(uid)

    def _write(self, copy: _Copy, size_bytes: int, now_s: float) -> int:
        """Write what SSD does not have of a session of that size; returns how much."""
        more_bytes = max(size_bytes - copy.written_bytes, 0)
        copy.written_bytes = size_bytes
        if more_bytes:
            self.tally.ssd_written_bytes += more_bytes
            lag_s = self.ssd.write(more_bytes, now_s)
            self.tally.most_write_lag_s = max(self.tally.most_write_lag_s, lag_s)
        return more_bytes

    def _lost(self, uid: bytes) -> None:
        self._unprefetched(uid)
        copy = self._copies.get(uid)
        if copy is not None and self.tiers.tier(uid) is None:
            copy.written_bytes, copy.loss = 0, Loss.GIVEN_UP

    def _unprefetched(self, uid: bytes) -> None:
        copy = self._copies.get(uid)
        if copy is not None and copy.ready_s < math.inf:
            self.tally.prefetches_unused += 1
            copy.ready_s = math.inf
