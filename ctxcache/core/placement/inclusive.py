"""The ledger of a store whose DRAM is a cache of its SSD, as the server's is: what it holds SSD has, if it is worth it.

What comes is written to SSD once, what grows by what it grew; leaving DRAM costs nothing then and frees no SSD. What
is not admitted there lies in DRAM alone until it is, or leaves. Worst case: as of `ledger.Ledger`.
"""

from collections.abc import Callable, Iterator

from ctxcache.core.placement.admission import Leaving, is_worth_writing
from ctxcache.core.placement.ledger import Act, Ledger, Move, _Held
from ctxcache.core.placement.policy import Capacities, Policy, Tier


class InclusiveLedger(Ledger):
    """See Ledger. SSD takes `total_bytes` of the capacities; `used_bytes` of it counts what is in DRAM, too.

    ADMIT and GROW on SSD, and DEMOTE, say what is written there. DRAM keeps as much of what was just used as it takes.
    """

    def __init__(self, capacities: Capacities, policy: Policy, *, buffer_bytes: int = 0) -> None:
        super().__init__(capacities, policy, buffer_bytes=buffer_bytes)
        self._limits[Tier.SSD] = capacities.total_bytes

    def is_on_ssd(self, uid: bytes) -> bool:
        """See Ledger: in DRAM, too, or there alone."""
        held = self._held.get(uid)
        return held is not None and held.is_written

    def _admit(self, uid: bytes, size_bytes: int, moves: list[Move]) -> None:
        # DRAM first: rows are there before anybody can tell what they are worth.
        tier = Tier.DRAM if self._make_room(Tier.DRAM, size_bytes, moves, lambda _: True) else Tier.SSD
        is_written = tier is Tier.SSD or self._is_worth_writing(uid, size_bytes)
        if is_written and not self._make_room(Tier.SSD, size_bytes, moves, lambda _: True):
            self.policy.evicted(uid)
            moves.append(Move(Act.REFUSE, uid, size_bytes, Tier.SSD))
            return
        held = self._held[uid] = _Held(size_bytes, tier, is_written=is_written)
        for each in _tiers(held):
            self._used[each] += size_bytes
        moves.append(Move(Act.ADMIT, uid, size_bytes, Tier.SSD if is_written else Tier.DRAM))
        self.policy.placed(uid, tier)

    def _resize(self, uid: bytes, held: _Held, size_bytes: int, moves: list[Move]) -> None:
        def may_leave(other: bytes) -> bool:
            return other != uid

        more_bytes = size_bytes - held.size_bytes
        has_room = held.tier is Tier.SSD or self._make_room(Tier.DRAM, max(more_bytes, 0), moves, may_leave)
        if not has_room or held.pin_count or self._is_worth_writing(uid, size_bytes):
            is_written = held.is_written or self._write(uid, moves)
            if not is_written or not self._make_room(Tier.SSD, max(more_bytes, 0), moves, may_leave):
                moves.append(Move(Act.REFUSE, uid, more_bytes, Tier.SSD))
                if not held.pin_count:
                    self._evict(uid, moves)
                return
        if not has_room:
            self._drop(uid, moves)
        for tier in _tiers(held):
            self._used[tier] += more_bytes
        held.size_bytes = size_bytes
        moves.append(Move(Act.GROW, uid, more_bytes, Tier.SSD if held.is_written else Tier.DRAM))

    def _is_worth_writing(self, uid: bytes, size_bytes: int) -> bool:
        """Whether SSD is to have it; it keeps what it has some of."""
        if self.is_on_ssd(uid):
            return True
        return is_worth_writing(size_bytes, self._free_bytes(Tier.SSD), self._leaving(uid))

    def _leaving(self, uid: bytes) -> Iterator[Leaving]:
        seen = {uid}
        while (victim := self._first(Tier.SSD, lambda other: other not in seen)) is not None:
            seen.add(victim)
            yield Leaving(self.policy.gives_way(victim, uid), self._held[victim].size_bytes)

    def _first(self, tier: Tier, may_leave: Callable[[bytes], bool]) -> bytes | None:
        if tier is Tier.DRAM:
            return super()._first(tier, may_leave)
        return super()._first(tier, lambda uid: self._held[uid].is_written and may_leave(uid))

    def _make_room(
        self, tier: Tier, needed_bytes: int, moves: list[Move], may_leave: Callable[[bytes], bool]
    ) -> bool:
        if needed_bytes > self._limits[tier]:
            return False
        while self._free_bytes(tier) < needed_bytes:
            victim = self._first(tier, may_leave)
            if victim is None:
                return False
            leave = self._drop if tier is Tier.DRAM else self._evict
            leave(victim, moves)
        return True

    def _drop(self, uid: bytes, moves: list[Move]) -> None:
        held = self._held[uid]
        is_worth = held.is_written or self._is_worth_writing(uid, held.size_bytes)
        if not is_worth or not (held.is_written or self._write(uid, moves)):
            self._evict(uid, moves)
            return
        self._place(uid, Tier.SSD)
        moves.append(Move(Act.DROP, uid, held.size_bytes, Tier.SSD))

    def _write(self, uid: bytes, moves: list[Move]) -> bool:
        """Write what only DRAM has. Whether there was room, or could be made."""
        held = self._held[uid]
        if not self._make_room(Tier.SSD, held.size_bytes, moves, lambda other: other != uid):
            return False
        held.is_written = True
        self._used[Tier.SSD] += held.size_bytes
        moves.append(Move(Act.DEMOTE, uid, held.size_bytes, Tier.SSD))
        return True

    def _place(self, uid: bytes, tier: Tier) -> None:
        held = self._held[uid]
        self._used[Tier.DRAM] += held.size_bytes * ((tier is Tier.DRAM) - (held.tier is Tier.DRAM))
        held.tier = tier
        self.policy.placed(uid, tier)

    def _give_back(self, held: _Held) -> None:
        for tier in _tiers(held):
            self._used[tier] -= held.size_bytes


def _tiers(held: _Held) -> set[Tier]:
    """Where the session takes room."""
    return {Tier.SSD, held.tier} if held.is_written else {held.tier}
