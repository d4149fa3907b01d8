"""The ledger of a store whose DRAM is a cache of its SSD, as the server's is: whatever it holds, SSD has.

What comes is written to SSD once, what grows by what it grew; leaving DRAM costs nothing and frees no SSD.
It holds as much as exclusive tiers of the same capacities together. Worst case: as of `ledger.Ledger`.
"""

from collections.abc import Callable

from ctxcache.core.placement.ledger import Act, Ledger, Move, _Held
from ctxcache.core.placement.policy import Capacities, Policy, Tier


class InclusiveLedger(Ledger):
    """See Ledger. SSD takes `total_bytes` of the capacities; `used_bytes` of it counts what is in DRAM, too.

    ADMIT and GROW say what is written to SSD. DRAM keeps as much of what was just used as it takes.
    """

    def __init__(self, capacities: Capacities, policy: Policy, *, buffer_bytes: int = 0) -> None:
        super().__init__(capacities, policy, buffer_bytes=buffer_bytes)
        self._limits[Tier.SSD] = capacities.total_bytes

    def _admit(self, uid: bytes, size_bytes: int, moves: list[Move]) -> None:
        if not self._make_room(Tier.SSD, size_bytes, moves, lambda _: True):
            self.policy.evicted(uid)
            moves.append(Move(Act.REFUSE, uid, size_bytes, Tier.SSD))
            return
        self._held[uid] = _Held(size_bytes, Tier.SSD)
        self._used[Tier.SSD] += size_bytes
        moves.append(Move(Act.ADMIT, uid, size_bytes, Tier.SSD))
        has_room = self._make_room(Tier.DRAM, size_bytes, moves, lambda _: True)
        self._place(uid, Tier.DRAM if has_room else Tier.SSD)

    def _resize(self, uid: bytes, held: _Held, size_bytes: int, moves: list[Move]) -> None:
        more_bytes = size_bytes - held.size_bytes

        def may_leave(other: bytes) -> bool:
            return other != uid

        if not self._make_room(Tier.SSD, max(more_bytes, 0), moves, may_leave):
            moves.append(Move(Act.REFUSE, uid, more_bytes, Tier.SSD))
            if not held.pin_count:
                self._evict(uid, moves)
            return
        if held.tier is Tier.DRAM and not self._make_room(Tier.DRAM, max(more_bytes, 0), moves, may_leave):
            self._drop(uid, moves)
        for tier in {Tier.SSD, held.tier}:
            self._used[tier] += more_bytes
        held.size_bytes = size_bytes
        moves.append(Move(Act.GROW, uid, more_bytes, Tier.SSD))

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
        self._place(uid, Tier.SSD)
        moves.append(Move(Act.DROP, uid, self._held[uid].size_bytes, Tier.SSD))

    def _place(self, uid: bytes, tier: Tier) -> None:
        held = self._held[uid]
        self._used[Tier.DRAM] += held.size_bytes * ((tier is Tier.DRAM) - (held.tier is Tier.DRAM))
        held.tier = tier
        self.policy.placed(uid, tier)

    def _give_back(self, held: _Held) -> None:
        for tier in {Tier.SSD, held.tier}:
            self._used[tier] -= held.size_bytes
