"""Inclusive tiers: what DRAM has SSD has, within both capacities, whatever the events and the policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.core.placement.inclusive import InclusiveLedger
from ctxcache.core.placement.ledger import Act, Move
from ctxcache.core.placement.policies import POLICIES
from ctxcache.core.placement.policy import Capacities, Facts, Tier
from ctxcache.core.placement.recency import LeastRecentlyUsed

CAPACITIES = Capacities(dram_bytes=100, ssd_bytes=200)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("turn", "arrived", "ended", "pin", "unpin", "hinted", "prefetch")),
        st.integers(0, 11),
        st.integers(0, 330),
    ),
    max_size=120,
)


def _turn(ledger: InclusiveLedger, uid: bytes, now_s: float, size_bytes: int = 40) -> list[Move]:
    return ledger.arrived(uid, now_s) + ledger.idle(uid, Facts(size_bytes, 1, 8), now_s)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(events=EVENTS)
def test_no_capacity_is_exceeded_and_nothing_pinned_is_evicted(
    name: str, events: list[tuple[str, int, int]]
) -> None:
    """SSD holds every session, DRAM some of them; what is used is what the sessions add up to."""
    ledger = InclusiveLedger(CAPACITIES, POLICIES[name](CAPACITIES), buffer_bytes=10)
    sizes, pins = dict[bytes, int](), dict[bytes, int]()
    for now_s, (event, number, size_bytes) in enumerate(events):
        uid, moves = bytes([number]), list[Move]()
        if event == "turn":
            moves = _turn(ledger, uid, now_s, size_bytes)
            sizes[uid] = size_bytes
        elif event == "arrived":
            moves = ledger.arrived(uid, now_s)
        elif event == "ended":
            moves, _ = ledger.ended(uid), pins.pop(uid, None)
        elif event == "pin" and ledger.tier(uid):
            ledger.pin(uid)
            pins[uid] = pins.get(uid, 0) + 1
        elif event == "unpin" and pins.get(uid):
            ledger.unpin(uid)
            pins[uid] -= 1
        elif event == "hinted":
            ledger.policy.hinted(uid, size_bytes)
        elif event == "prefetch":
            moves = ledger.prefetch()
        # One that is pinned and cannot grow stays as it was.
        refused = [move for move in moves if move.act is Act.REFUSE and pins.get(move.uid)]
        sizes |= {move.uid: sizes[move.uid] - move.size_bytes for move in refused}

        held = {uid: size for uid, size in sizes.items() if ledger.tier(uid)}
        in_dram = sum(size for uid, size in held.items() if ledger.tier(uid) is Tier.DRAM)
        assert ledger.used_bytes(Tier.SSD) == sum(held.values()) <= 300
        assert ledger.used_bytes(Tier.DRAM) == in_dram <= 100
        assert all(ledger.tier(uid) for uid, count in pins.items() if count)


def test_leaving_dram_costs_nothing_and_growing_what_it_grew() -> None:
    """SSD is written as much as came; it is full with what both tiers together take."""
    ledger = InclusiveLedger(Capacities(80, 80), LeastRecentlyUsed())
    moves = [move for number in range(5) for move in _turn(ledger, bytes([number]), number)]
    moves += _turn(ledger, b"\4", 5, 60)

    written = [move.size_bytes for move in moves if move.act in (Act.ADMIT, Act.GROW)]
    assert written == [40, 40, 40, 40, 40, 20]
    tiers = [ledger.tier(bytes([number])) for number in range(5)]
    assert tiers == [None, None, Tier.SSD, Tier.SSD, Tier.DRAM]
    assert ledger.used_bytes(Tier.SSD) == 140


def test_a_session_larger_than_dram_lies_on_ssd() -> None:
    """It is kept and read where it lies."""
    ledger = InclusiveLedger(Capacities(80, 80), LeastRecentlyUsed())
    _turn(ledger, b"large", 0, 100)

    assert ledger.tier(b"large") is Tier.SSD
    assert not ledger.arrived(b"large", 1)
