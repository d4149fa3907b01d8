"""Tiers: where every simulated session lies, within capacities, and what a policy's word means for it.

Events come in, and moves come out, to be carried out in the order given. A session lies in one tier, whole. A session
in a turn, or pinned, is never moved by another's need. Worst case: everything is pinned, and what comes is refused.

In inclusive tiers memory is a cache of what is below, as the server's is: a session is written below once, if it is
worth it, and then by what it grew; leaving memory costs nothing then and frees nothing below. A session that is not
admitted below lies in memory alone until it is, or leaves.
"""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ctxcache.core.placement.policy import Capacities, Facts, Leaving, Policy, Tier, is_worth_writing


class Act(enum.Enum):
    """What is done with a session."""

    ADMIT = "admit"
    GROW = "grow"
    PROMOTE = "promote"
    DEMOTE = "demote"
    DROP = "drop"
    EVICT = "evict"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Move:
    """`size_bytes` of a session to be moved, `tier` being where they lie afterwards (or lay, of EVICT).

    DROP: they leave DRAM, and SSD has them.
    """

    act: Act
    uid: bytes
    size_bytes: int
    tier: Tier


@dataclass(slots=True)
class _Held:
    size_bytes: int
    tier: Tier
    pin_count: int = 0
    is_written: bool = True
    """Off: DRAM alone has it, of a ledger in which SSD has what DRAM has."""


class Tiers:
    """Sessions by tier. `buffer_bytes` of DRAM are kept free for promotions and growth. Owned by its caller."""

    def __init__(self, capacities: Capacities, policy: Policy, *, buffer_bytes: int = 0) -> None:
        if not 0 <= buffer_bytes <= capacities.memory_bytes:
            raise ValueError(f"a buffer of {buffer_bytes} B in {capacities.memory_bytes} B of DRAM")
        self.policy = policy
        self._limits = {Tier.MEMORY: capacities.memory_bytes, Tier.BELOW: capacities.below_bytes}
        self._buffer_bytes = buffer_bytes
        self._used = dict.fromkeys(Tier, 0)
        self._held: dict[bytes, _Held] = {}
        self._in_turn: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._held)

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of sessions that lie in the tier."""
        return self._used[tier]

    def tier(self, uid: bytes) -> Tier | None:
        """Where the session lies; None where it does not."""
        held = self._held.get(uid)
        return held.tier if held else None

    def is_on_ssd(self, uid: bytes) -> bool:
        """Whether SSD has all of the session, whichever tier it lies in."""
        return self.tier(uid) is Tier.BELOW

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
        if self.tier(uid) is Tier.BELOW:
            self._promote(uid, moves, lambda _: True)
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
        self._make_room(Tier.MEMORY, self._buffer_bytes, moves, lambda _: True)
        return moves

    def ended(self, uid: bytes) -> list[Move]:
        """The session was deleted or expired, pinned or not."""
        held = self._held.pop(uid, None)
        self._in_turn.discard(uid)
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
        if uid is None or not self._may_move(uid):
            return []
        moves: list[Move] = []
        # The buffer stays free: who is needed last would be demoted for it, and be promoted again.
        spare_bytes = self._buffer_bytes
        # Nor does it leave SSD for one that DRAM gives up for it.
        self._in_turn.add(uid)
        self._promote(uid, moves, lambda other: not self.policy.is_needed_soon(other, uid), spare_bytes)
        self._in_turn.discard(uid)
        return moves

    def _free_bytes(self, tier: Tier) -> int:
        return self._limits[tier] - self._used[tier]

    def _may_move(self, uid: bytes) -> bool:
        held = self._held.get(uid)
        return held is not None and not held.pin_count and uid not in self._in_turn

    def _admit(self, uid: bytes, size_bytes: int, moves: list[Move]) -> None:
        for tier in Tier:
            if self._make_room(tier, size_bytes, moves, lambda _: True):
                self._held[uid] = _Held(size_bytes, tier)
                self._used[tier] += size_bytes
                self.policy.placed(uid, tier)
                moves.append(Move(Act.ADMIT, uid, size_bytes, tier))
                return
        self.policy.evicted(uid)
        moves.append(Move(Act.REFUSE, uid, size_bytes, Tier.MEMORY))

    def _resize(self, uid: bytes, held: _Held, size_bytes: int, moves: list[Move]) -> None:
        """Grow, or shrink, in place; a session that cannot grow is given up, unless it is pinned as it was."""
        more_bytes = size_bytes - held.size_bytes
        if self._make_room(held.tier, max(more_bytes, 0), moves, lambda other: other != uid):
            self._used[held.tier] += more_bytes
            held.size_bytes = size_bytes
            moves.append(Move(Act.GROW, uid, more_bytes, held.tier))
            return
        moves.append(Move(Act.REFUSE, uid, more_bytes, held.tier))
        if not held.pin_count:
            self._evict(uid, moves)

    def _promote(
        self, uid: bytes, moves: list[Move], may_leave: Callable[[bytes], bool], spare_bytes: int = 0
    ) -> None:
        size_bytes = self._held[uid].size_bytes
        if self._make_room(
            Tier.MEMORY, size_bytes + spare_bytes, moves, lambda other: other != uid and may_leave(other)
        ):
            self._place(uid, Tier.MEMORY)
            moves.append(Move(Act.PROMOTE, uid, size_bytes, Tier.MEMORY))

    def _make_room(
        self, tier: Tier, needed_bytes: int, moves: list[Move], may_leave: Callable[[bytes], bool]
    ) -> bool:
        """Free that much of the tier. Whether it was possible; what left is gone either way."""
        if needed_bytes > self._limits[tier]:
            return False

        while self._free_bytes(tier) < needed_bytes:
            victim = self._first(tier, may_leave)
            if victim is None:
                return False
            held = self._held[victim]
            if tier is Tier.MEMORY and held.size_bytes <= self._free_bytes(Tier.BELOW):
                self._place(victim, Tier.BELOW)
                moves.append(Move(Act.DEMOTE, victim, held.size_bytes, Tier.BELOW))
                continue
            if tier is Tier.MEMORY and held.size_bytes <= self._limits[Tier.BELOW]:
                victim = self._first(Tier.BELOW, may_leave)
                if victim is None:
                    return False
            self._evict(victim, moves)
        return True

    def _first(self, tier: Tier, may_leave: Callable[[bytes], bool]) -> bytes | None:
        """Who leaves the tier first, of those that may; out of SSD means out of the store, from either tier."""
        if tier is Tier.BELOW:
            return self.policy.evict(lambda uid: self._may_move(uid) and may_leave(uid))
        return self.policy.demote(
            lambda uid: self._may_move(uid) and self._held[uid].tier is Tier.MEMORY and may_leave(uid)
        )

    def _place(self, uid: bytes, tier: Tier) -> None:
        held = self._held[uid]
        self._used[held.tier] -= held.size_bytes
        self._used[tier] += held.size_bytes
        held.tier = tier
        self.policy.placed(uid, tier)

    def _evict(self, uid: bytes, moves: list[Move]) -> None:
        held = self._held.pop(uid)
        self._give_back(held)
        self.policy.evicted(uid)
        self.policy.withdrawn(uid)
        moves.append(Move(Act.EVICT, uid, held.size_bytes, held.tier))

    def _give_back(self, held: _Held) -> None:
        """It lies nowhere any more."""
        self._used[held.tier] -= held.size_bytes


class InclusiveTiers(Tiers):
    """See Tiers. SSD takes `total_bytes` of the capacities; `used_bytes` of it counts what is in DRAM, too.

    ADMIT and GROW on SSD, and DEMOTE, say what is written there. DRAM keeps as much of what was just used as it takes.
    """

    def __init__(self, capacities: Capacities, policy: Policy, *, buffer_bytes: int = 0) -> None:
        super().__init__(capacities, policy, buffer_bytes=buffer_bytes)
        self._limits[Tier.BELOW] = capacities.total_bytes

    def is_on_ssd(self, uid: bytes) -> bool:
        """See Tiers: in DRAM, too, or there alone."""
        held = self._held.get(uid)
        return held is not None and held.is_written

    def _admit(self, uid: bytes, size_bytes: int, moves: list[Move]) -> None:
        # DRAM first: rows are there before anybody can tell what they are worth.
        tier = Tier.MEMORY if self._make_room(Tier.MEMORY, size_bytes, moves, lambda _: True) else Tier.BELOW
        is_written = tier is Tier.BELOW or self._is_worth_writing(uid, size_bytes)
        if is_written and not self._make_room(Tier.BELOW, size_bytes, moves, lambda _: True):
            self.policy.evicted(uid)
            moves.append(Move(Act.REFUSE, uid, size_bytes, Tier.BELOW))
            return
        held = self._held[uid] = _Held(size_bytes, tier, is_written=is_written)
        for each in _tiers(held):
            self._used[each] += size_bytes
        moves.append(Move(Act.ADMIT, uid, size_bytes, Tier.BELOW if is_written else Tier.MEMORY))
        self.policy.placed(uid, tier)

    def _resize(self, uid: bytes, held: _Held, size_bytes: int, moves: list[Move]) -> None:
        def may_leave(other: bytes) -> bool:
            return other != uid

        more_bytes = size_bytes - held.size_bytes
        has_room = held.tier is Tier.BELOW or self._make_room(
            Tier.MEMORY, max(more_bytes, 0), moves, may_leave
        )
        if not has_room or held.pin_count or self._is_worth_writing(uid, size_bytes):
            is_written = held.is_written or self._write(uid, moves)
            if not is_written or not self._make_room(Tier.BELOW, max(more_bytes, 0), moves, may_leave):
                moves.append(Move(Act.REFUSE, uid, more_bytes, Tier.BELOW))
                if not held.pin_count:
                    self._evict(uid, moves)
                return
        if not has_room:
            self._drop(uid, moves)
        for tier in _tiers(held):
            self._used[tier] += more_bytes
        held.size_bytes = size_bytes
        moves.append(Move(Act.GROW, uid, more_bytes, Tier.BELOW if held.is_written else Tier.MEMORY))

    def _is_worth_writing(self, uid: bytes, size_bytes: int) -> bool:
        """Whether SSD is to have it; it keeps what it has some of."""
        if self.is_on_ssd(uid):
            return True
        return is_worth_writing(size_bytes, self._free_bytes(Tier.BELOW), self._leaving(uid))

    def _leaving(self, uid: bytes) -> Iterator[Leaving]:
        seen = {uid}
        while (victim := self._first(Tier.BELOW, lambda other: other not in seen)) is not None:
            seen.add(victim)
            yield Leaving(self.policy.gives_way(victim, uid), self._held[victim].size_bytes)

    def _first(self, tier: Tier, may_leave: Callable[[bytes], bool]) -> bytes | None:
        if tier is Tier.MEMORY:
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
            leave = self._drop if tier is Tier.MEMORY else self._evict
            leave(victim, moves)
        return True

    def _drop(self, uid: bytes, moves: list[Move]) -> None:
        held = self._held[uid]
        is_worth = held.is_written or self._is_worth_writing(uid, held.size_bytes)
        if not is_worth or not (held.is_written or self._write(uid, moves)):
            self._evict(uid, moves)
            return
        self._place(uid, Tier.BELOW)
        moves.append(Move(Act.DROP, uid, held.size_bytes, Tier.BELOW))

    def _write(self, uid: bytes, moves: list[Move]) -> bool:
        """Write what only DRAM has. Whether there was room, or could be made."""
        held = self._held[uid]
        if not self._make_room(Tier.BELOW, held.size_bytes, moves, lambda other: other != uid):
            return False
        held.is_written = True
        self._used[Tier.BELOW] += held.size_bytes
        moves.append(Move(Act.DEMOTE, uid, held.size_bytes, Tier.BELOW))
        return True

    def _place(self, uid: bytes, tier: Tier) -> None:
        held = self._held[uid]
        self._used[Tier.MEMORY] += held.size_bytes * ((tier is Tier.MEMORY) - (held.tier is Tier.MEMORY))
        held.tier = tier
        self.policy.placed(uid, tier)

    def _give_back(self, held: _Held) -> None:
        for tier in _tiers(held):
            self._used[tier] -= held.size_bytes


def _tiers(held: _Held) -> set[Tier]:
    """Where the session takes room."""
    return {Tier.BELOW, held.tier} if held.is_written else {held.tier}
