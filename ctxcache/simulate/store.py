"""The simulated store: the ledger that serves, an SSD in time, and counts of what they do. Knows no queue.

Memory: an entry per session between its first turn and its end.
"""

import enum
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ctxcache.core.placement.inclusive import InclusiveLedger
from ctxcache.core.placement.ledger import Act, Ledger, Move
from ctxcache.core.placement.policy import Capacities, Facts, Policy, Tier
from ctxcache.simulate.device import Ssd
from ctxcache.simulate.load import Load
from ctxcache.simulate.pipeline import Fetch
from ctxcache.simulate.tally import Tally

NextUse = Callable[[bytes], float]
"""When a session is needed next, in seconds of the trace."""
MakePolicy = Callable[[Capacities, NextUse], Policy]


class Loss(enum.Enum):
    """Why a session has no state."""

    GIVEN_UP = enum.auto()
    VOID = enum.auto()


@dataclass(slots=True)
class _Copy:
    """`written_bytes` of the session are on SSD and valid, whichever tier the ledger has it in."""

    written_bytes: int = 0
    ready_s: float = math.inf
    """When the prefetch under way, or not used yet, is in DRAM; infinity without one."""
    loss: Loss | None = None


class Store:
    """What is kept of sessions. `tally` may be exchanged between two calls."""

    def __init__(self, load: Load, make_policy: MakePolicy, next_use_s: NextUse) -> None:
        # Sessions count whole in the ledger: of their first layers alone DRAM takes so many more.
        dram_bytes = min(int(load.dram_bytes / load.resident_share), load.dram_bytes + load.ssd_bytes)
        capacities = Capacities(dram_bytes, load.dram_bytes + load.ssd_bytes - dram_bytes)
        policy = make_policy(capacities, next_use_s)
        make_ledger = InclusiveLedger if load.is_inclusive else Ledger
        self.ledger = make_ledger(capacities, policy, buffer_bytes=int(dram_bytes * load.buffer_share))
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
        tier = self.ledger.tier(uid)
        if tier is Tier.SSD:
            missing_share = 1.0
        elif tier is Tier.DRAM:
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
        self._moved(self.ledger.arrived(uid, now_s), now_s)
        return fetch

    def end(self, uid: bytes, facts: Facts, valid_bytes: range, now_s: float) -> None:
        """The turn is over. `valid_bytes` of what the session had before are part of it still."""
        copy = self._copies.get(uid)
        if copy is None:
            copy = self._copies[uid] = _Copy()
        elif copy.written_bytes:
            copy.written_bytes = max(min(copy.written_bytes, valid_bytes.stop) - valid_bytes.start, 0)
        copy.loss = None
        self._moved(self.ledger.idle(uid, facts, now_s), now_s)
        if self.ledger.is_on_ssd(uid):
            self.tally.ssd_rewritten_bytes += self._write(copy, facts.size_bytes, now_s)

    def void(self, uid: bytes) -> None:
        """The session goes on, its state does not."""
        self._unprefetched(uid)
        self.ledger.ended(uid)
        self._copies[uid] = _Copy(loss=Loss.VOID)

    def expire(self, uid: bytes) -> None:
        """The session is over."""
        self._unprefetched(uid)
        self._copies.pop(uid, None)
        self.ledger.ended(uid)

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
        moves = self.ledger.prefetch()
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
        if copy is not None and self.ledger.tier(uid) is None:
            copy.written_bytes, copy.loss = 0, Loss.GIVEN_UP

    def _unprefetched(self, uid: bytes) -> None:
        copy = self._copies.get(uid)
        if copy is not None and copy.ready_s < math.inf:
            self.tally.prefetches_unused += 1
            copy.ready_s = math.inf
