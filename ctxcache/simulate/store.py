"""The simulated store: the tiers that serves, an SSD in time, and counts of what they do. Knows no queue.

The SSD serves one read at a time; writes queue behind each other and share its speed with reads.
Memory: an entry per session between its first turn and its end.
"""

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ctxcache.core.placement.policy import Capacities, Facts, Policy, Tier
from ctxcache.simulate.load import Load
from ctxcache.simulate.pipeline import Fetch
from ctxcache.simulate.tally import Tally
from ctxcache.simulate.tiers import Act, InclusiveTiers, Move, Tiers


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
    """What is kept of sessions. `tally` may be exchanged between two calls."""

    def __init__(self, load: Load, make_policy: MakePolicy, next_use_s: NextUse) -> None:
        # Sessions count whole in the tiers: of their first layers alone DRAM takes so many more.
        dram_bytes = min(int(load.dram_bytes / load.resident_share), load.dram_bytes + load.ssd_bytes)
        capacities = Capacities(dram_bytes, load.dram_bytes + load.ssd_bytes - dram_bytes)
        policy = make_policy(capacities, next_use_s)
        make_tiers = InclusiveTiers if load.is_inclusive else Tiers
        self.tiers = make_tiers(capacities, policy, buffer_bytes=int(dram_bytes * load.buffer_share))
        self.tally = Tally()
        self.ssd = Ssd(
            load.ssd_read_bytes_per_s,
            load.ssd_write_bytes_per_s,
            # Where turns take no time none of them holds back the next, and a backlog would mean nothing.
            is_serial=load.is_timed or load.slot_count is not None,
        )
        self._resident_share = load.resident_share
        self._copies: dict[bytes, _Copy] = {}

    def begin(self, uid: bytes, history_bytes: int, now_s: float) -> Fetch:
        """A turn begins and reads its history; returns how that comes to DRAM, from now on."""
        ready_s, missing_share, copy = 0.0, 0.0, self._copies.get(uid)
        tier = self.tiers.tier(uid)
        if tier is Tier.BELOW:
            missing_share = 1.0
        elif tier is Tier.MEMORY:
            missing_share = 1.0 - self._resident_share
            if copy is not None and copy.ready_s < math.inf:
                self.tally.prefetch_met(copy.ready_s, now_s)
                ready_s = max(copy.ready_s - now_s, 0.0)
                copy.ready_s = math.inf
        fetch = Fetch(ready_s)
        if missing_share:
            begin_s = self.ssd.free_s(now_s)
            end_s = self.ssd.read(int(history_bytes * missing_share), now_s)
            fetch = Fetch(ready_s, begin_s - now_s, end_s - begin_s)
        self._moved(self.tiers.arrived(uid, now_s), now_s)
        return fetch

    def end(self, uid: bytes, facts: Facts, valid_bytes: range, now_s: float) -> None:
        """The turn is over. `valid_bytes` of what the session had before are part of it still."""
        copy = self._copies.get(uid)
        if copy is None:
            copy = self._copies[uid] = _Copy()
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
        self._copies[moves[-1].uid].ready_s = self.ssd.read(
            int(moves[-1].size_bytes * self._resident_share), now_s
        )
        self.tally.prefetches += 1
        return True

    def _moved(self, moves: Iterable[Move], now_s: float) -> None:
        tally = self.tally
        for move in moves:
            act, uid, size_bytes = move.act, move.uid, move.size_bytes
            if act is Act.PROMOTE:
                tally.promoted_bytes += size_bytes
            elif act is Act.DROP:
                self._unprefetched(uid)
            elif act is Act.DEMOTE:
                self._unprefetched(uid)
                tally.ssd_rewritten_bytes += size_bytes
                self._write(self._copies[uid], size_bytes, now_s)
            elif act is Act.EVICT:
                tally.evicted_sessions += 1
                self._lost(uid)
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
