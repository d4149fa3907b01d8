"""Tenants in a ledger: whose sessions leave for whom, whatever comes."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ctxcache.core.placement.inclusive import InclusiveLedger
from ctxcache.core.placement.ledger import Act, Ledger, Move
from ctxcache.core.placement.policies import POLICIES
from ctxcache.core.placement.policy import Capacities, Facts, Tier
from ctxcache.core.placement.retention import Grants, Retention
from ctxcache.core.placement.shares import REST, Share, Shares
from ctxcache.core.placement.tenants import PerTenant

CAPACITIES = Capacities(dram_bytes=120, ssd_bytes=280)
SHARES = Shares({"a": Share(0.5), "b": Share(0.25)})
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("arrived", "idle", "idle", "ended", "retain", "pin", "release", "prefetch", "hinted")),
        st.integers(0, 14),
        st.integers(1, 90),
        st.integers(0, 40),
    ),
    max_size=120,
)  # fmt: skip
Events = list[tuple[str, int, int, int]]


def _tenant(uid: bytes) -> str:
    return ("a", "b", "x")[uid[0] % 3]


class _Store:
    """A ledger of two tenants with shares and others, checked after each event."""

    def __init__(self, policy: str, kind: type[Ledger], shares: Shares = SHARES) -> None:
        self.shares = shares

        def grants(capacity_bytes: int) -> Grants:
            return Grants(
                lambda account: shares.own_bytes(account, capacity_bytes // 2),
                lambda uid: shares.account(_tenant(uid)),
            )

        self.retention = Retention(
            grants(CAPACITIES.total_bytes), grants(CAPACITIES.dram_bytes), longest_s=200
        )
        make = POLICIES[policy]
        self.policy = PerTenant(shares, CAPACITIES, lambda: make(CAPACITIES), _tenant, self.retention)
        self.ledger = kind(CAPACITIES, self.policy, buffer_bytes=10)
        self.now_s = 0.0
        self.sizes: dict[bytes, int] = {}
        self.in_turn: set[bytes] = set()
        self.moves: list[Move] = []

    def play(self, event: str, uid: bytes, size_bytes: int, passed_s: int) -> None:
        """One event, as far as it means anything."""
        self.now_s += passed_s
        ledger = self.ledger
        before = {other: (size, self.used(other)) for other, size in self.sizes.items()}
        levels = {other: self.retention.store_level(other) for other in self.sizes}
        moves: list[Move] = []
        if event == "arrived":
            self.in_turn.add(uid)
            moves = ledger.arrived(uid, self.now_s)
        elif event == "idle":
            moves = ledger.idle(uid, Facts(size_bytes, 1, size_bytes // 2), self.now_s)
            levels = {other: self.retention.store_level(other) for other in self.sizes} | levels
            self.in_turn.discard(uid)
        elif event == "ended":
            self.in_turn.discard(uid)
            ledger.ended(uid)
            self.sizes.pop(uid, None)
        elif event == "prefetch":
            moves = ledger.prefetch()
        elif event == "hinted":
            ledger.policy.hinted(uid, float(size_bytes))
        elif event == "release":
            self.retention.release(uid)
        elif uid in self.sizes:
            ask = self.retention.retain if event == "retain" else self.retention.pin
            ask(uid, self.sizes[uid], self.now_s + size_bytes, size_bytes % 4, self.now_s)
        self.moves += moves
        self._check(uid, moves, before)

    def used(self, uid: bytes) -> int:
        """Bytes of everybody of the session's account."""
        account = self.shares.account(_tenant(uid))
        return sum(
            size for other, size in self.sizes.items() if self.shares.account(_tenant(other)) == account
        )

    def _check(self, subject: bytes, moves: list[Move], before: dict[bytes, tuple[int, int]]) -> None:
        used = {
            self.shares.account(_tenant(uid)): account_bytes for uid, (_, account_bytes) in before.items()
        }
        for move in moves:
            if move.act is Act.EVICT and move.uid != subject:
                assert move.uid not in self.in_turn
                account = self.shares.account(_tenant(move.uid))
                if account != self.shares.account(_tenant(subject)):
                    assert used[account] > self.shares.guaranteed_bytes(account, CAPACITIES.total_bytes)
                used[account] -= move.size_bytes
            if move.act is Act.EVICT:
                self.sizes.pop(move.uid)
            elif move.act in (Act.ADMIT, Act.GROW):
                self.sizes[move.uid] = self.sizes.get(move.uid, 0) + move.size_bytes
        for account in self.shares.accounts:
            own = [s for uid, s in self.sizes.items() if self.shares.account(_tenant(uid)) == account]
            assert self.policy.used_bytes(account) == sum(own)
        assert sum(self.sizes.values()) <= CAPACITIES.total_bytes
        assert self.ledger.used_bytes(Tier.DRAM) <= CAPACITIES.dram_bytes


def _play(policy: str, kind: type[Ledger], events: Events, shares: Shares = SHARES) -> _Store:
    store = _Store(policy, kind, shares)
    for event, number, size_bytes, passed_s in events:
        store.play(event, bytes([number]), size_bytes, passed_s)
    return store


@pytest.mark.parametrize("kind", [Ledger, InclusiveLedger])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30)
@given(events=EVENTS)
def test_nobody_within_its_share_loses_a_session_to_another(
    policy: str, kind: type[Ledger], events: Events
) -> None:
    """Whoever loses one to another's need was above its share; who is in a turn loses nothing; bounds hold."""
    _play(policy, kind, events)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=20)
@given(events=EVENTS)
def test_the_same_events_make_the_same_moves(policy: str, events: Events) -> None:
    """No decision depends on anything but the events."""
    assert _play(policy, Ledger, events).moves == _play(policy, Ledger, events).moves


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30)
@given(events=EVENTS)
def test_soft_pins_never_wedge_the_store(policy: str, events: Events) -> None:
    """With everything retained and pinned, a new session of the size of any idle one finds room."""
    store = _play(policy, InclusiveLedger, events, Shares())
    for uid, size_bytes in list(store.sizes.items()):
        store.retention.retain(uid, size_bytes, store.now_s + 100, 100, store.now_s)
        store.retention.pin(uid, size_bytes, store.now_s + 100, 100, store.now_s)
    idle = [uid for uid in store.sizes if uid not in store.in_turn]
    assume(idle)

    store.play("idle", bytes([99]), store.sizes[idle[0]], 0)
    assert store.ledger.tier(bytes([99]))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=30)
@given(events=EVENTS)
def test_what_is_retained_leaves_after_what_is_not(policy: str, events: Events) -> None:
    """`evict` names a session of a higher class only where none of a lower one of its account may leave."""
    store = _play(policy, InclusiveLedger, events, Shares())
    victim = store.policy.evict(lambda uid: uid not in store.in_turn)
    idle = [uid for uid in store.sizes if uid not in store.in_turn]
    if victim is None:
        assert not idle
    else:
        assert store.retention.store_level(victim) == min(map(store.retention.store_level, idle))


def test_a_flood_takes_only_what_nobody_was_guaranteed() -> None:
    """One tenant floods: the other's sessions are all still there; when the other comes back, the flood shrinks."""
    store = _Store("lru", InclusiveLedger)
    for number in range(0, 12, 3):
        store.play("idle", bytes([number]), 50, 1)
    for number in range(1, 120, 3):
        store.play("idle", bytes([number]), 20, 1)
    assert {bytes([number]) for number in range(0, 12, 3)} <= set(store.sizes)
    assert store.used(b"\1") == 200

    for number in range(2, 12, 3):
        store.play("idle", bytes([number]), 25, 1)
    # Beyond its share of 100 the flood has 40, and who has none 50: one session less would be less than that.
    assert (store.used(b"\0"), store.used(b"\1")) == (200, 140)
    assert store.used(b"\2") == 50


def test_a_pinned_session_that_everybody_needs_room_of_leaves_last() -> None:
    """DRAM's coldest is not demoted while others that are not pinned can be."""
    store = _Store("lru", InclusiveLedger, Shares())
    store.play("idle", b"\0", 40, 1)
    store.retention.pin(b"\0", 40, 100, 0, store.now_s)
    for number in range(1, 6):
        store.play("idle", bytes([number]), 40, 1)
    assert store.ledger.tier(b"\0") is Tier.DRAM
    store.retention.release(b"\0")
    store.play("idle", b"\7", 40, 1)
    assert store.ledger.tier(b"\0") is Tier.SSD
    assert store.policy.used_bytes(REST) == sum(store.sizes.values())
